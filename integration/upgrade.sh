#!/usr/bin/env bash
# Runs a cluster of an older build whose nodes become those of this one, under load, and checks every byte.
#
#   integration/upgrade.sh OLD_BINARY
#
# Three nodes of OLD_BINARY, each with a disk, and four engines; each node is replaced by this build, and then the
# first one by the older build again. It says what it ran and fails with the log of the node that was not right.
set -euo pipefail

if [[ $# -ne 1 || ! -x $1 ]]; then
  printf 'usage: %s OLD_BINARY\n' "$0" >&2
  exit 64
fi
old="$(realpath "$1")"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

printf 'older build: %s (%s)\n' "$("$old" --version)" "$(sha256sum "$old" | cut -c1-12)"
KVSTRATA_OLD_BINARY=$old cargo test --test integration upgrade:: -- --nocapture
