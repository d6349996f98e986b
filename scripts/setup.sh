#!/usr/bin/env bash
# Installs what a build needs beside a Rust toolchain, or says what is missing.
#
#   scripts/setup.sh           what building and running need
#   scripts/setup.sh --tests   also what the tests need
#
# Does nothing and takes no time when nothing is missing. Installs on Debian and Ubuntu as root;
# elsewhere it lists what to install and fails.
set -euo pipefail

say() { printf 'setup: %s\n' "$*" >&2; }

has_c_compiler() {
  printf '#include <stdlib.h>\nint main(void) { return 0; }\n' \
    | cc -x c -o /dev/null - 2>/dev/null
}

has_cxx_compiler() {
  printf '#include <vector>\nint main() { return 0; }\n' \
    | c++ -x c++ -o /dev/null - 2>/dev/null
}

# RocksDB's bindings are made from its headers by libclang.
has_libclang() {
  compgen -G '/usr/lib/llvm-*/lib/libclang*.so*' | grep -qv libclang-cpp \
    || compgen -G '/usr/lib*/libclang.so*' >/dev/null \
    || compgen -G "${LIBCLANG_PATH:-/nowhere}/libclang*.so*" >/dev/null
}

# The tests need Python 3.11 or newer with the modules that Debian packages apart.
has_python() {
  python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# The console is looked at in a browser without a window.
has_browser() {
  command -v "${KVSTRATA_BROWSER:-chromium-headless-shell}" >/dev/null \
    || command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null
}

# Debian has one as a package; without it those tests say that they were skipped.
install_browser() {
  if [[ $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
    say 'no browser: the tests of the console will be skipped'
    return
  fi
  say 'installing: chromium-headless-shell'
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends chromium-headless-shell fonts-dejavu-core >/dev/null \
    || say 'no browser could be installed: the tests of the console will be skipped'
}

# The dashboards and alerts are put to a Prometheus. Debian's package would start it as a service.
install_prometheus() {
  if [[ $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
    say 'no prometheus: the tests of the dashboards will be skipped'
    return
  fi
  say 'installing: prometheus'
  local policy=/usr/sbin/policy-rc.d
  export DEBIAN_FRONTEND=noninteractive
  # Whoever asks before a package starts a service is told no, for as long as this takes.
  if [[ ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
  fi
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends prometheus >/dev/null \
    || say 'no prometheus could be installed: the tests of the dashboards will be skipped'
  if command -v systemctl >/dev/null; then
    systemctl --quiet disable prometheus prometheus-node-exporter 2>/dev/null || true
  fi
}

check_rust() {
  if ! cargo --version >/dev/null 2>&1; then
    say 'no Rust toolchain: install Rust 1.95 or newer with rustup, then run this again'
    exit 1
  fi
}

# Prints the Debian packages that are missing, one a line.
missing_packages() {
  if ! has_c_compiler || ! has_cxx_compiler; then
    echo build-essential
  fi
  has_libclang || echo libclang-dev
  # Without them neither cargo nor pip can verify what it downloads.
  if command -v apt-get >/dev/null && [[ ! -e ${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt} ]]; then
    echo ca-certificates
  fi
  if [[ $tests == yes ]]; then
    has_python || printf '%s\n' python3 python3-venv
    command -v git >/dev/null || echo git
    command -v openssl >/dev/null || echo openssl
    command -v strace >/dev/null || echo strace
    command -v ip >/dev/null || echo iproute2
    command -v iptables >/dev/null || echo iptables
  fi
}

install_packages() {
  if ! command -v apt-get >/dev/null; then
    say "not a Debian or Ubuntu machine. Install by hand what these packages hold: $*"
    exit 1
  fi
  if [[ $(id -u) -ne 0 ]]; then
    say "not root. Ask for, or run: apt-get update && apt-get install $*"
    exit 1
  fi
  say "installing: $*"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

tests=no
case "${1-}" in
  '') ;;
  --tests) tests=yes ;;
  *)
    say "unknown argument: $1 (only --tests is known)"
    exit 64
    ;;
esac

check_rust
mapfile -t missing < <(missing_packages)
if ((${#missing[@]} > 0)); then
  install_packages "${missing[@]}"
  mapfile -t missing < <(missing_packages)
  if ((${#missing[@]} > 0)); then
    say "still missing after the installation: ${missing[*]} (Python 3.11 or newer is needed)"
    exit 1
  fi
fi
if [[ $tests == yes ]] && ! has_browser; then
  install_browser
fi
if [[ $tests == yes ]] && ! command -v promtool >/dev/null; then
  install_prometheus
fi
