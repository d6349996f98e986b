#!/usr/bin/env bash
# vLLM with kvstrata on a machine without a GPU, in one command.
#
#   run.sh            a restarted engine finds the blocks of a long prompt in kvstrata (demo.py)
#   run.sh handoff    one engine computes a prompt, another takes its blocks and goes on (handoff.py)
#
# It builds kvstrata and installs vLLM for CPUs and a small model. Everything goes to target/ (3.5 GB);
# further arguments go to the Python program.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export VLLM_ENV="$PWD/target/vllm-env"
scripts/setup.sh
scripts/python-tools.sh
cargo build --locked --bin kvstrata
scripts/vllm-env.sh "$VLLM_ENV"
rm -rf target/wheels
PATH="$PWD/.venv/bin:$PATH" .venv/bin/python -m pip wheel --quiet --no-deps --no-build-isolation \
  --wheel-dir target/wheels --config-settings build-args='--profile dev --locked' ./python
"$VLLM_ENV/venv/bin/python" -m pip install --quiet --no-deps --no-index --force-reinstall \
  target/wheels/kvstrata-*.whl
program=demo
if [[ ${1:-} == handoff ]]; then
  program=handoff
  shift
fi
exec .venv/bin/python "examples/vllm-cpu/$program.py" "$@"
