#!/usr/bin/env bash
# vLLM with kvstrata on a machine without a GPU, in one command.
#
# Builds kvstrata, installs vLLM for CPUs and a small model, and shows what a restarted engine saves: it
# finds the blocks of a long prompt in kvstrata. Everything goes to target/ (3.5 GB); arguments go to
# demo.py.
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
exec .venv/bin/python examples/vllm-cpu/demo.py "$@"
