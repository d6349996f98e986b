#!/usr/bin/env bash
# Builds kvstrata and its Python package (release, dram only), installs the peers, and measures all of
# them in the same interleaved rounds. Arguments go to bench.py (--help says which).
#
# redis and memcached come from the system (apt-get install redis-server memcached). A peer that is
# missing or does not start is left out, with its reason in the table. A fixed number of cores and
# nothing else running give figures worth reading; with others about, read the ratios.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

venv=target/peers/venv
export CARGO_INCREMENTAL=0

cargo build --release --locked --no-default-features --bin kvstrata

[[ -x $venv/bin/python ]] || python3 -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input)
requirements=benches/peers/requirements.txt
if ! "${pip[@]}" --requirement "$requirements"; then
  echo 'Not everything installs here: one by one, and on with what does.' >&2
  grep -v '^#' "$requirements" | while read -r requirement; do
    "${pip[@]}" --no-deps "$requirement" || true
  done
fi
PATH="$PWD/$venv/bin:$PATH" "${pip[@]}" --no-deps --no-build-isolation --force-reinstall \
  --config-settings build-args='--profile release --locked' ./python

exec "$venv/bin/python" benches/peers/bench.py "$@"
