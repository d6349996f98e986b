#!/usr/bin/env bash
# Power loss and failing writes under the nvme tier, on a real kernel in an emulated machine.
#
#   integration/vm/flakey.sh [--rounds N] [--seed N] [--binary FILE]
#
# Boots Debian's kernel under qemu (no KVM, no network) with `kvstrata` and a disk behind dm-flakey.
# What each round does there is in guest.sh. Prints one line for each round and exits non-zero if
# a single one is not as it must be. On Debian as root it installs what is missing; everything else
# is written below the target directory and TMPDIR. Takes minutes: run on demand, not by scripts/test.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# Six rounds take half of that.
readonly deadline_s=560
readonly disk_mib=192
target=${CARGO_TARGET_DIR:-target}
cache=$target/vm
rounds=6
seed=1
binary=''

say() { printf 'flakey: %s\n' "$*" >&2; }

fail() {
  say "$*"
  exit 1
}

while (($# > 0)); do
  case $1 in
    --rounds) rounds=${2:?} ;;
    --seed) seed=${2:?} ;;
    --binary) binary=${2:?} ;;
    *)
      say "unknown argument: $1 (--rounds, --seed and --binary are known)"
      exit 64
      ;;
  esac
  shift 2
done
[[ $rounds =~ ^[1-9][0-9]?$ && $seed =~ ^[0-9]{1,9}$ ]] || {
  say 'a number of rounds from 1 to 99 and a seed of at most 9 digits are allowed'
  exit 64
}

# Prints the Debian packages that are missing, one a line.
missing_packages() {
  local program package
  while read -r program package; do
    PATH=$PATH:/usr/sbin:/sbin command -v "$program" >/dev/null || echo "$package"
  done <<'END'
qemu-system-x86_64 qemu-system-x86
busybox busybox-static
cpio cpio
strip binutils
xz xz-utils
dmsetup dmsetup
mkfs.ext4 e2fsprogs
END
}

install_packages() {
  local missing
  mapfile -t missing < <(missing_packages)
  ((${#missing[@]} > 0)) || return 0
  command -v apt-get >/dev/null || fail "install by hand what these packages hold: ${missing[*]}"
  [[ $(id -u) -eq 0 ]] || fail "not root. Run: apt-get update && apt-get install ${missing[*]}"
  say "installing: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# Unpacks the kernel into the cache, once.
fetch_kernel() {
  [[ ! -e $cache/kernel/complete ]] || return 0
  local package
  package=$(apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/^ *Depends: //p' | head -n 1)
  if [[ -z $package ]]; then
    apt-get update -qq
    package=$(apt-cache depends linux-image-amd64 | sed -n 's/^ *Depends: //p' | head -n 1)
  fi
  [[ -n $package ]] || fail 'apt knows no linux-image-amd64'
  say "fetching $package"
  rm -rf "$cache/kernel" "$cache/packages"
  mkdir -p "$cache/kernel" "$cache/packages"
  # The list of packages may be older than the mirror.
  (cd "$cache/packages" && { apt-get download -qq "$package" 2>/dev/null \
    || { apt-get update -qq && apt-get download -qq "$package"; }; })
  dpkg -x "$cache"/packages/*.deb "$cache/kernel"
  rm -rf "$cache/packages"
  touch "$cache/kernel/complete"
}

# In the order in which they need each other; one that is missing is part of the kernel.
readonly modules=(
  crc16 crc32c_generic libcrc32c mbcache jbd2 ext4
  virtio_ring virtio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci virtio_blk
  dm-mod dm-bufio dm-flakey
)

# add PROGRAM: into the image, with its libraries.
add() {
  local library
  install -D "$1" "$root/bin/$(basename "$1")"
  for library in $(ldd "$1" | grep -oE '/[^ ]+'); do
    [[ -e $root$library ]] || install -D "$library" "$root$library"
  done
}

make_image() {
  local module file program
  mkdir -p "$root"/{bin,modules,proc,sys,dev,mnt,tmp,run,etc}
  install "$(command -v busybox)" "$root/bin/busybox"
  for module in "${modules[@]}"; do
    file=$(find "$cache/kernel" -name "$module.ko*" -print -quit)
    case $file in
      '') continue ;;
      *.xz) xz -dc "$file" >"$root/modules/$module.ko" ;;
      *) install "$file" "$root/modules/$module.ko" ;;
    esac
    echo "$module" >>"$root/modules/order"
  done
  for program in bash dmsetup mkfs.ext4 e2fsck; do
    add "$(PATH=$PATH:/usr/sbin:/sbin command -v "$program")"
  done
  # Without what only a debugger reads it is a third of the size.
  strip -o "$work/kvstrata" "$binary"
  add "$work/kvstrata"
  install integration/vm/guest.sh "$root/init"
  (cd "$root" && find . | cpio --quiet -o -H newc) >"$work/image"
}

cleanup() {
  [[ -z ${machine:-} ]] || kill -KILL "$machine" 2>/dev/null || true
  rm -rf "$work"
}

install_packages
fetch_kernel
if [[ -z $binary ]]; then
  cargo build --locked --bin kvstrata
  binary=$target/debug/kvstrata
fi
work=$(mktemp -d)
root=$work/root
trap cleanup EXIT
make_image
truncate -s "${disk_mib}M" "$work/disk"
mkdir -p "$cache/last"
: >"$cache/last/results"

say "booting; the console is in $cache/last/console"
kernel=$(find "$cache/kernel/boot" -name 'vmlinuz-*' -print -quit)
qemu-system-x86_64 -accel tcg -cpu max -smp 2 -m 1024 -net none -display none -no-reboot \
  -kernel "$kernel" -initrd "$work/image" \
  -append "console=ttyS0 quiet panic=-1 kvstrata.rounds=$rounds kvstrata.seed=$seed" \
  -drive "file=$work/disk,if=virtio,format=raw,cache=unsafe" \
  -serial "file:$cache/last/console" -serial "file:$cache/last/results" </dev/null &
machine=$!
booted=$SECONDS
while kill -0 "$machine" 2>/dev/null; do
  if ((SECONDS - booted > deadline_s)); then
    say "stopping the machine after $deadline_s s"
    kill -KILL "$machine"
  fi
  sleep 1
done
machine=''

tr -d '\r' <"$cache/last/results"
passed=$(grep -c ' OK' "$cache/last/results" || true)
if [[ $passed -ne $rounds ]]; then
  fail "$passed of $rounds rounds passed; what servers and kernel said is in $cache/last/console"
fi
say "all $rounds rounds passed in $SECONDS s"
