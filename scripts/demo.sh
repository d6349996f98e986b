#!/usr/bin/env bash
# From a fresh clone to real-looking traffic through a node, every byte checked.
#
# Installs what is missing, builds, starts a node with an nvme tier in a temporary directory, replays
# the sample trace through its socket and prints the table. Meanwhile the node is killed several times
# and has to come back with everything that it had acknowledged. Exits non-zero if a single byte was
# wrong or a single acknowledged block was lost. Takes up to 2 GiB in TMPDIR, given back at the end.
# Arguments go to `kvstrata replay`, e.g. --clients 8.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
cargo build --locked --bin kvstrata
"${CARGO_TARGET_DIR:-target}/debug/kvstrata" replay examples/sample-trace.jsonl.zst \
  --nvme 2GiB --durable --crash-every 40..80 "$@"
