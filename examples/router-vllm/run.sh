#!/usr/bin/env bash
# The reference router in front of two real vLLM engines on a machine without a GPU, in one command.
#
#   run.sh [--mode timed]      what router.py shows; further arguments go to it
#
# It builds kvstrata and installs vLLM for CPUs and a small model. Everything goes to target/ (3.5 GB).
# VLLM_ENV names an environment that scripts/vllm-env.sh has made already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export VLLM_ENV="${VLLM_ENV:-$PWD/target/vllm-env}"
scripts/setup.sh
scripts/python-tools.sh
cargo build --locked --bin kvstrata
scripts/vllm-env.sh "$VLLM_ENV"
rm -rf target/wheels
PATH="$PWD/.venv/bin:$PATH" .venv/bin/python -m pip wheel --quiet --no-deps --no-build-isolation \
  --wheel-dir target/wheels --config-settings build-args='--profile dev --locked' ./python
"$VLLM_ENV/venv/bin/python" -m pip install --quiet --no-deps --no-index --force-reinstall \
  target/wheels/kvstrata-*.whl
exec .venv/bin/python examples/router-vllm/router.py "$@"
