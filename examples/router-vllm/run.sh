#!/usr/bin/env bash
# The reference router in front of two real vLLM engines on a machine without a GPU, in one command.
#
#   run.sh [--mode timed]      what router.py shows; further arguments go to it
#
# It builds kvstrata and installs vLLM for CPUs and a small model (vllm-cpu/prepare.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export VLLM_ENV="${VLLM_ENV:-$PWD/target/vllm-env}"
examples/vllm-cpu/prepare.sh
exec .venv/bin/python examples/router-vllm/router.py "$@"
