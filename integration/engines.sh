#!/usr/bin/env bash
# Runs the adapter of one engine inside the real engine, on a CPU.
#
#   integration/engines.sh sglang|lmcache [DIRECTORY]
#
# DIRECTORY, target/NAME-env if not given, gets an environment with the engine: a minute and 2 GB the
# first time. Then it builds the server and the Python package, and runs integration/NAME.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=${1-}
sources=integration/$name
if [[ $# -gt 2 || ! -f $sources/requirements.txt || ! -f $sources/test_real.py ]]; then
  printf 'usage: %s sglang|lmcache [DIRECTORY]\n' "$0" >&2
  exit 64
fi
directory=${2-target/$name-env}
python=$directory/venv/bin/python
stubs=integration/vllm/environment/cuda_stubs.py
uv_version=0.13.9

make_environment() {
  local stamp
  stamp="$(cat "$sources/requirements.txt" "$stubs" | sha256sum)"
  if [[ -f $directory/stamp && $(<"$directory/stamp") == "$stamp" ]] && "$python" -c '' 2>/dev/null; then
    return
  fi
  rm -rf "$directory/stamp" "$directory/venv"
  python3 -m venv "$directory/venv"
  "$python" -m pip install --quiet --disable-pip-version-check --no-input "uv==$uv_version"
  "$directory/venv/bin/uv" pip install --quiet --python "$python" --no-deps \
    --requirement "$sources/requirements.txt"
  # The index has torch for GPUs only: it is given libraries that say there is none.
  "$python" "$stubs" "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch/lib"
  printf '%s\n' "$stamp" >"$directory/stamp"
}

# The package as a user installs it, but in the dev profile, with what is compiled already.
install_package() {
  local wheels
  wheels="$(mktemp -d)"
  PATH="$PWD/.venv/bin:$PATH" .venv/bin/python -m pip wheel --quiet --disable-pip-version-check \
    --no-input --no-deps --no-build-isolation --wheel-dir "$wheels" \
    --config-settings build-args='--profile dev --locked --features tests' ./python
  "$python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps \
    --force-reinstall "$wheels"/*.whl
  rm -rf "$wheels"
}

scripts/python-tools.sh
make_environment
cargo build --locked --bin kvstrata
install_package
# SGLang compiles its hashes when it is first asked for one, with tools of its environment.
PATH="$(cd "$directory/venv/bin" && pwd):$PATH" PYTHONPATH="python/tests:python/tests/$name" \
  "$python" -m pytest --quiet -p no:cacheprovider -p conftest -W ignore --rootdir "$sources" "$sources"
