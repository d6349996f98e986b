#!/bin/busybox sh
# Runs as the only program of the machine that flakey.sh boots: the rounds, each on a new file system.
#
# lost writes   A replay writes with durable puts. At a random moment the disk turns into one that
#               acknowledges writes and loses them; a moment later everything is killed. On the disk
#               as it is then a new server must have every block that was acknowledged before that
#               moment, and not a wrong byte; it must take the rest of the trace, end well, and
#               have all of it after one more start.
# failing       The same, and the disk fails every write. The server must stay up, take no more and
#               say so, and deliver what it has. Then the disk fails reads too: the server must stay
#               up and deliver nothing wrong. Then everything is killed, and a new server on the
#               healthy disk must have every block that was ever acknowledged.
#
# What was acknowledged is in the ledger that `kvstrata replay` keeps for servers that are killed. It
# lies in memory. Requests of the trace have 16 new blocks each, so blocks 0 to 15 belong to the first.

busybox=/bin/busybox
$busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
ip link set lo up
hostname guest
ulimit -n 65536
while read -r module; do
  insmod "/modules/$module.ko" || echo "module $module cannot be loaded"
done </modules/order

requests=150
new_blocks=16
disk=/dev/vda
sectors=$(blockdev --getsz $disk)
trace=/tmp/trace.jsonl
# The tiers: nvme has room for everything, dram for 1024 blocks.
sizes='--dram 4MiB --memory 256MiB --nvme 96MiB --segment-bytes 1MiB --nvme-path /mnt'
results=/dev/ttyS1
stty -F $results raw -echo 2>/dev/null

argument() { sed -n "s/.*kvstrata\.$1=\([0-9]*\).*/\1/p" /proc/cmdline; }

rounds=$(argument rounds)
random=$(argument seed)

# draw FROM TO: sets `drawn` to a number of this range.
draw() {
  random=$(((random * 1103515245 + 12345) % 2147483648))
  drawn=$(($1 + (random / 65536) % ($2 - $1 + 1)))
}

# Each request extends one of eight chains: 16 blocks that are there by then, and 16 new ones.
make_trace() {
  awk -v n=$requests -v size=$new_blocks 'BEGIN {
    for (i = 0; i < n; i++) {
      before = i < 8 ? "" : sprintf("[%d,%d],", (i - 8) * size, size)
      printf "{\"timestamp\":%d,\"input_length\":2048,\"output_length\":1,\"hash_ranges\":[%s[%d,%d]]}\n", \
        i, before, i * size, size
    }
  }' >$trace
}

say() { echo "round $round: $*"; }

# wrong WHAT: notes something that must not be.
wrong() {
  say "WRONG: $*"
  problems="$problems; $*"
}

table() {
  case $1 in
    healthy) echo "0 $sectors linear $disk 0" ;;
    lost) echo "0 $sectors flakey $disk 0 0 86400 1 drop_writes" ;;
    failing) echo "0 $sectors flakey $disk 0 0 86400 1 error_writes" ;;
    dead) echo "0 $sectors error" ;;
  esac
}

attach() {
  dmsetup create kv --table "$(table healthy)" && mount -t ext4 -o data=ordered /dev/dm-0 /mnt
}

# Killed processes may hold them for a moment.
detach() {
  tries=0
  while grep -q ' /mnt ' /proc/mounts && ! umount /mnt 2>/dev/null; do
    tries=$((tries + 1))
    [ $tries -lt 100 ] || { wrong 'the file system stays busy'; return 1; }
    usleep 100000
  done
  while [ -e /dev/dm-0 ] && ! dmsetup remove kv 2>/dev/null; do
    tries=$((tries + 1))
    [ $tries -lt 100 ] || { wrong 'the device stays busy'; return 1; }
    usleep 100000
  done
}

# Blocks that a ledger claims.
kept_blocks() { awk '$1 == "kept" { for (i = 2; i <= NF; i++) kept[$i] = 1 } END { print length(kept) }' "$1"; }

# How many requests from the first on have all their blocks in a ledger.
kept_requests() {
  awk -v size=$new_blocks '
    $1 == "kept" { for (i = 2; i <= NF; i++) kept[$i] = 1 }
    END { while (block in kept || (block == "" && 0 in kept)) block++; print int(block / size) }' "$1"
}

# number FILE NAME: of a report in JSON.
number() { awk -F'[:,]' -v name="\"$2\"" '{ key = $1; gsub(/ /, "", key) } key == name { print $2 + 0; exit }' "$1"; }

# ask PATH: of the server at `http`. Not with wget: that of a static busybox looks up names by libraries.
ask() {
  # shellcheck disable=SC2016 # Expanded by the other shell.
  timeout 20 bash -c 'exec 3<>"/dev/tcp/${0%:*}/${0#*:}" || exit 1
    printf "GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n" "$1" "$0" >&3
    IFS= read -r status <&3
    cat <&3
    [[ $status == *" 200 "* ]]' "$http" "$1"
}

# metric PATTERN: the sum of what the server at `http` counts.
metric() { ask /metrics | awk -v name="$1" '$0 ~ name { sum += $NF } END { print sum + 0 }'; }

# address LOG grpc|http
address() { sed -n "s/.* listening .*$2=\([^ ]*\).*/\1/p" "$1" | tail -n 1; }

# Waits until the server that logs into $1 is ready; sets `grpc` and `http`.
await_ready() {
  tries=0
  while :; do
    http=$(address "$1" http)
    if [ -n "$http" ] && ask /readyz >/dev/null 2>&1; then
      grpc=$(address "$1" grpc)
      return 0
    fi
    tries=$((tries + 1))
    if [ $tries -ge 600 ] || ! kill -0 "$server" 2>/dev/null; then
      wrong "the server does not start"
      tail -n 20 "$1"
      return 1
    fi
    usleep 100000
  done
}

# start_server LOG: on what the first one left, with its secret.
start_server() {
  kvstrata serve --grpc-listen 127.0.0.1:0 --http-listen 127.0.0.1:0 --dram 4MiB \
    --set memory.limit=256MiB --set nvme.capacity=96MiB --set nvme.segment_bytes=1MiB \
    --set nvme.path=/mnt --set identity.secret_file="$secret" >/dev/null 2>"$1" &
  server=$!
  await_ready "$1" || return 1
  grep -E ' WARN| ERROR|recovered' "$1"
}

stop_server() {
  kill -TERM "$server"
  wait "$server" || wrong "the server ended with $?"
}

# read_back WHAT REQUESTS: all blocks of that many requests must be there.
read_back() {
  [ "$2" -gt 0 ] || return 0
  kvstrata replay $trace --requests "$2" --block-bytes 4KiB --endpoint "$grpc" --json \
    >/tmp/read.json 2>/tmp/read.err || {
    wrong "$1: the replay ended with $?"
    tail -n 3 /tmp/read.err
  }
  missed=$(number /tmp/read.json misses)
  bad=$(number /tmp/read.json wrong_bytes)
  say "$1: $2 requests, misses ${missed:-?}, wrong bytes ${bad:-?}, from nvme $(number /tmp/read.json hits_nvme)"
  [ "${missed:-1}" = 0 ] || wrong "$1: ${missed:-?} of the blocks are missing"
  [ "${bad:-1}" = 0 ] || wrong "$1: ${bad:-?} wrong bytes"
}

# Starts the replay with a server of its own, and lets it work to a random moment. Then changes the
# disk to $1, with nothing under way: what is in /tmp/acknowledged was on the disk before.
disturb() {
  rm -rf /tmp/replay
  mkdir /tmp/replay
  # shellcheck disable=SC2086 # Several arguments.
  TMPDIR=/tmp/replay kvstrata replay $trace --block-bytes 4KiB $sizes \
    --durable --clients "$clients" --crash-every 1000000000 --remove-share 0 >/tmp/replay.out 2>&1 &
  driver=$!
  dmsetup reload kv --table "$(table "$1")" || wrong 'dmsetup reload'
  # Reads of a dead disk need more blocks than dram has.
  least=$((requests / 10))
  [ $kind = lost ] || least=$((requests / 2))
  draw $least $((requests * 6 / 10))
  after=$drawn
  draw 0 400
  tries=0
  until [ "$(cat /tmp/replay/*/ledger 2>/dev/null | wc -l)" -ge $after ]; do
    tries=$((tries + 1))
    if [ $tries -gt 600 ] || ! kill -0 $driver 2>/dev/null; then
      wrong 'the replay does not get on'
      cat /tmp/replay.out
      break
    fi
    usleep 100000
  done
  usleep $((drawn * 1000))
  dmsetup suspend --nolockfs --noflush kv || wrong 'dmsetup suspend'
  # Answers that are on their way arrive; nothing new can be acknowledged.
  usleep 300000
  cat /tmp/replay/*/ledger >/tmp/acknowledged
  dmsetup resume --nolockfs --noflush kv || wrong 'dmsetup resume'
  secret=/tmp/identity
  cp /tmp/replay/*/identity $secret
}

kill_all() {
  kill -KILL $driver 2>/dev/null
  wait $driver 2>/dev/null
  killall -KILL kvstrata 2>/dev/null
  cat /tmp/replay/*/ledger >/tmp/acknowledged.last
  grep -E ' WARN| ERROR' /tmp/replay/*/server.log | tail -n 6
}

# Puts the disk as it is under a healthy table again.
mend() {
  detach || return 1
  e2fsck -fy $disk >/tmp/fsck 2>&1
  fsck=$?
  say "e2fsck: $fsck"
  [ $fsck -lt 4 ] || { wrong "e2fsck: $fsck"; cat /tmp/fsck; }
  attach || wrong 'the file system cannot be mounted'
}

# The server on the mended disk: has what it must, takes the rest, and has that too.
check_recovered() {
  start_server /tmp/server.1 || return 1
  blocks=$(metric '^kvstrata_nvme_recovered_blocks')
  read_back 'acknowledged' "$checked"
  kvstrata replay $trace --block-bytes 4KiB --endpoint "$grpc" --durable --clients "$clients" --json \
    >/tmp/rest.json 2>/tmp/rest.err || {
    wrong "the rest of the trace: the replay ended with $?"
    tail -n 3 /tmp/rest.err
  }
  stored=$(number /tmp/rest.json stored)
  say "the rest: stored $stored, not durable $(number /tmp/rest.json not_durable)"
  [ "$(number /tmp/rest.json not_durable)" = 0 ] || wrong 'the mended disk takes no writes'
  [ "$(number /tmp/rest.json wrong_bytes)" = 0 ] || wrong 'wrong bytes in the rest'
  stop_server
  start_server /tmp/server.2 || return 1
  read_back 'after one more start' $requests
  stop_server
}

lost_writes() {
  disturb lost
  draw 200 3000
  usleep $((drawn * 1000))
  kill_all
  checked=$(kept_requests /tmp/acknowledged)
  mend && check_recovered
}

dead_disk() {
  dmsetup reload kv --table "$(table dead)" || wrong 'dmsetup reload'
  dmsetup resume --nolockfs --noflush kv || wrong 'dmsetup resume'
  # It ends badly: blocks that were found are not delivered.
  timeout 60 kvstrata replay $trace --requests "$(kept_requests /tmp/acknowledged)" --block-bytes 4KiB \
    --endpoint "$grpc" --json >/tmp/dead.json 2>/tmp/dead.err
  bad=$(number /tmp/dead.json wrong_bytes)
  failed=$(metric '^kvstrata_nvme_errors_total.*"read"')
  say "on a dead disk: wrong bytes ${bad:-?}, reads failed $failed, $(tail -n 1 /tmp/dead.err)"
  [ "${bad:-1}" = 0 ] || wrong "on a dead disk: ${bad:-?} wrong bytes"
  [ "$failed" -gt 0 ] || wrong 'no read of the dead disk failed'
}

failing_writes() {
  disturb failing
  server=$(pidof kvstrata | tr ' ' '\n' | grep -vx $driver)
  log=$(echo /tmp/replay/*/server.log)
  await_ready "$log"
  tries=0
  until grep -qE 'nvme (write|sync) failed' "$log"; do
    tries=$((tries + 1))
    [ $tries -lt 600 ] || { wrong 'the server takes writes that fail'; break; }
    usleep 30000
  done
  # Before it has finished and stops its server.
  kill -KILL $driver
  [ "$(metric '^kvstrata_nvme_state.*(failing|read_only)')" = 1 ] || wrong 'the server is ready for writes'
  # What is put now is readable and not durable, and nobody is told otherwise.
  kvstrata replay $trace --block-bytes 4KiB --endpoint "$grpc" --durable --clients "$clients" --json \
    >/tmp/refused.json 2>/tmp/refused.err || {
    wrong "puts while writes fail: the replay ended with $?"
    tail -n 3 /tmp/refused.err
  }
  say "puts while writes fail: not durable $(number /tmp/refused.json not_durable), durable $(number /tmp/refused.json stored)"
  [ "$(number /tmp/refused.json stored)" = 0 ] || wrong 'writes that failed were acknowledged'
  ask /metrics | grep -E '^kvstrata_nvme_(state|errors|rejected).* [1-9]'
  read_back 'while writes fail' "$(kept_requests /tmp/acknowledged)"
  dead_disk
  kill -0 "$server" 2>/dev/null || wrong 'the server is gone'
  kill_all
  checked=$(kept_requests /tmp/acknowledged.last)
  mend && check_recovered
}

# The tier never evicts here, so the new server cannot have fewer blocks than were acknowledged.
check_counts() {
  [ -n "$blocks" ] || return 0
  must=$acknowledged
  [ $kind = lost ] || must=$((acknowledged + later))
  [ "$blocks" -ge "$must" ] || wrong "$must blocks were acknowledged"
  # What is acknowledged for longer than one group of writes was never on the disk: else the rounds
  # test nothing.
  if [ $kind = lost ] && [ $later -ge 256 ] && [ "$blocks" -ge $((acknowledged + later)) ]; then
    wrong 'the disk has lost nothing'
  fi
}

one_round() {
  problems=''
  started=$(cut -d. -f1 /proc/uptime)
  blocks='' stored='' fsck='' checked=0
  if ! mkfs.ext4 -q -F -E lazy_itable_init=0,lazy_journal_init=0 $disk >/dev/null 2>&1 || ! attach; then
    wrong 'no file system'
  elif [ $kind = lost ]; then
    lost_writes
  else
    failing_writes
  fi
  killall -KILL kvstrata 2>/dev/null
  detach
  took=$(($(cut -d. -f1 /proc/uptime) - started))
  acknowledged=$(kept_blocks /tmp/acknowledged)
  later=$(($(kept_blocks /tmp/acknowledged.last) - acknowledged))
  check_counts
  verdict=OK
  [ -z "$problems" ] || verdict="FAILED${problems}"
  printf '%5s  %-8s %-9s %7s %13s %7s %9s %9s %7s %5s %5s  %s\n' "$round" "$kind" "$engine" "$clients" \
    "$acknowledged" "$later" $((checked * new_blocks)) "${blocks:-?}" "${stored:-?}" "${fsck:-?}" "$took" \
    "$verdict" >$results
}

make_trace
: >/tmp/acknowledged
: >/tmp/acknowledged.last
echo "Linux $(uname -r), up $(cut -d' ' -f1 /proc/uptime) s"
printf '%5s  %-8s %-9s %7s %13s %7s %9s %9s %7s %5s %5s  %s\n' round writes engine clients \
  acknowledged later checked recovered stored fsck s result >$results
round=1
while [ "$round" -le "$rounds" ]; do
  # Of three rounds one has writes that fail; engines and clients take turns.
  kind=lost
  [ $((round % 3)) -ne 0 ] || kind=failing
  engine=io_uring
  [ $((round % 2)) -ne 0 ] || engine=pread
  export KV_NVME__ENGINE=$engine
  clients=$((1 + 2 * (round / 2 % 2)))
  one_round
  round=$((round + 1))
done
sync
poweroff -f
