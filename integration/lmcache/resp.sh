#!/usr/bin/env bash
# Runs a real LMCache against the RESP listener. Not a part of scripts/test.sh: LMCache installs with
# PyTorch, which takes gigabytes.
#
#   integration/lmcache/resp.sh PYTHON [BINARY]
#
# PYTHON is that of an environment with LMCache (pip install lmcache==0.5.6); BINARY the server, by
# default what `cargo build` leaves.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if (($# < 1)); then
  printf 'usage: integration/lmcache/resp.sh PYTHON [BINARY]\n' >&2
  exit 64
fi
exec "$1" integration/lmcache/resp.py "$(realpath "${2:-target/debug/kvstrata}")"
