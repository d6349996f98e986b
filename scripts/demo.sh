#!/usr/bin/env bash
# From a fresh clone to real-looking traffic through a node, every byte checked.
#
# Installs what is missing, builds, starts a node on its built-in defaults, replays the sample trace
# through its socket and prints the table. Exits non-zero if a single byte was wrong. Arguments go
# to `kvstrata replay`, e.g. --clients 8.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
cargo build --locked --bin kvstrata
"${CARGO_TARGET_DIR:-target}/debug/kvstrata" replay examples/sample-trace.jsonl.zst "$@"
