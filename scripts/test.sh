#!/usr/bin/env bash
# Runs every check there is, cheap ones first, and stops at the first that fails.
#
# One cargo profile (dev) for everything, so that nothing is compiled twice. At the end, also after
# a failure, it prints what each part took and which tests could not run for lack of shared data:
# those append their names to the file named by KVSTRATA_SKIP_LOG.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export CARGO_TERM_COLOR="${CARGO_TERM_COLOR:-auto}"
KVSTRATA_SKIP_LOG="$(mktemp)"
export KVSTRATA_SKIP_LOG

parts=()
running=''
started=0

# part NAME COMMAND...: runs one part and notes its time.
part() {
  running=$1
  started=$SECONDS
  shift
  printf '\n==== %s: %s\n' "$running" "$*"
  "$@"
  parts+=("$(printf '%6d s  %s' $((SECONDS - started)) "$running")")
  running=''
}

summary() {
  local code=$?
  printf '\n==== summary\n'
  if ((${#parts[@]} > 0)); then
    printf '%s\n' "${parts[@]}"
  fi
  if [[ -n $running ]]; then
    printf '%6d s  %s FAILED\n' $((SECONDS - started)) "$running"
  fi
  if [[ -s $KVSTRATA_SKIP_LOG ]]; then
    printf '\n!!!! NOT RUN for lack of shared data (%d):\n' "$(sort -u "$KVSTRATA_SKIP_LOG" | wc -l)"
    sort -u "$KVSTRATA_SKIP_LOG" | sed 's/^/!!!!   /'
  fi
  rm -f "$KVSTRATA_SKIP_LOG"
  if ((code == 0)); then
    printf '\nAll parts passed.\n'
  else
    printf '\nNot all parts passed.\n'
  fi
}
trap summary EXIT

lint_scripts() {
  .venv/bin/shellcheck scripts/*.sh .ci/run
  .venv/bin/ruff check --quiet --no-cache .
  .venv/bin/ruff format --quiet --no-cache --check .
}

docs() {
  RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --locked
}

part 'setup' scripts/setup.sh --tests
part 'python tools' scripts/python-tools.sh
part 'format' cargo fmt --all --check
part 'scripts' lint_scripts
part 'chart' .venv/bin/python integration/chart/check.py
part 'clippy' cargo clippy --workspace --all-targets --locked -- -D warnings
part 'docs' docs
part 'tests' cargo test --workspace --locked
