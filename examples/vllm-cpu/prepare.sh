#!/usr/bin/env bash
# What the examples with vLLM need, in target/ (3.5 GB): kvstrata, vLLM for CPUs with kvstrata's package,
# a small model. VLLM_ENV names an environment that scripts/vllm-env.sh has made already.
#
#   prepare.sh        in the root of the repository; VLLM_ENV is set
set -euo pipefail

scripts/setup.sh
scripts/python-tools.sh
cargo build --locked --bin kvstrata
scripts/vllm-env.sh "$VLLM_ENV"
rm -rf target/wheels
PATH="$PWD/.venv/bin:$PATH" .venv/bin/python -m pip wheel --quiet --no-deps --no-build-isolation \
  --wheel-dir target/wheels --config-settings build-args='--profile dev --locked' ./python
"$VLLM_ENV/venv/bin/python" -m pip install --quiet --no-deps --no-index --force-reinstall \
  target/wheels/kvstrata-*.whl
