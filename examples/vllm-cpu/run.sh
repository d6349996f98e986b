#!/usr/bin/env bash
# vLLM with kvstrata on a machine without a GPU, in one command.
#
#   run.sh            a restarted engine finds the blocks of a long prompt in kvstrata (demo.py)
#   run.sh handoff    one engine computes a prompt, another takes its blocks and goes on (handoff.py)
#
# It builds kvstrata and installs vLLM for CPUs and a small model (prepare.sh); further arguments go to
# the Python program.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export VLLM_ENV="${VLLM_ENV:-$PWD/target/vllm-env}"
examples/vllm-cpu/prepare.sh
program=demo
if [[ ${1:-} == handoff ]]; then
  program=handoff
  shift
fi
exec .venv/bin/python "examples/vllm-cpu/$program.py" "$@"
