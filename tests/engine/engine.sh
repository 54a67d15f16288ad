#!/bin/bash
# A Docker engine and a registry from nothing: `engine.sh start DIR`, `engine.sh stop DIR`. Root on Debian or Ubuntu.
# Everything lives in DIR. The engine has no bridge and no firewall rules of its own, so any number of them can run side
# by side; its builds and containers use `--network none` (or host). Failing to start is a failure: non-zero, with the log.
set -euo pipefail

verb=${1:?start or stop} dir=${2:?a folder for the engine}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)

alive() { [[ -s $dir/$1.pid ]] && kill -0 "$(<"$dir/$1.pid")" 2>/dev/null; }

await() { # await NAME SECONDS COMMAND…: until the command succeeds, or the process is gone, or time is up
  local name=$1 tries=$(($2 * 10))
  shift 2
  for ((i = 0; i < tries; i++)); do
    "$@" >/dev/null 2>&1 && return 0
    if ((i > 20)) && ! alive "$name"; then break; fi
    sleep 0.1
  done
  echo "engine.sh: $name did not start; the end of $dir/$name.log:" >&2
  tail -n 20 "$dir/$name.log" >&2
  exit 1
}

install_missing() {
  local missing=()
  command -v dockerd >/dev/null || missing+=(docker.io)
  command -v docker-registry >/dev/null || missing+=(docker-registry)
  command -v mmdebstrap >/dev/null || missing+=(mmdebstrap arch-test)
  command -v curl >/dev/null || missing+=(curl ca-certificates)
  ((${#missing[@]})) || return 0
  apt-get update -q >&2
  DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "${missing[@]}" >&2
}

start() {
  install_missing
  if ! alive dockerd; then
    rm -f "$dir/dockerd.pid"
    setsid nohup dockerd --data-root "$dir/data" --exec-root "$dir/exec" --pidfile "$dir/dockerd.pid" \
      --host "unix://$dir/docker.sock" --bridge none --iptables=false --ip6tables=false --ip-masq=false \
      --ip-forward=false >"$dir/dockerd.log" 2>&1 </dev/null &
  fi
  await dockerd 60 curl -sf --unix-socket "$dir/docker.sock" http://engine/_ping

  # The port is kept, so that pinned references stay valid when the engine is stopped and started.
  [[ -s $dir/registry.port ]] || python3 -c \
    'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])' >"$dir/registry.port"
  local address="127.0.0.1:$(<"$dir/registry.port")"
  if ! alive registry; then
    cat >"$dir/registry.yml" <<YAML
version: 0.1
log: {level: warn}
storage: {filesystem: {rootdirectory: $dir/registry}, delete: {enabled: true}}
http: {addr: "$address"}
YAML
    setsid nohup docker-registry serve "$dir/registry.yml" >"$dir/registry.log" 2>&1 </dev/null &
    echo $! >"$dir/registry.pid"
  fi
  await registry 30 curl -sf "http://$address/v2/"
  echo "DOCKER_HOST=unix://$dir/docker.sock"
  echo "QUANTMINT_REGISTRY=$address"
}

stop() {
  for name in registry dockerd; do
    alive "$name" || continue
    pid=$(<"$dir/$name.pid")
    kill "$pid"
    for ((i = 0; i < 300; i++)); do
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.1
    done
    kill -0 "$pid" 2>/dev/null && { echo "engine.sh: $name (process $pid) does not stop" >&2; exit 1; }
    rm -f "$dir/$name.pid"
  done
  # the engine leaves its data folder bind-mounted on itself, which would keep anybody from removing it
  if mountpoint -q "$dir/data"; then umount "$dir/data"; fi
}

case $verb in
  start) start ;;
  stop) stop ;;
  *) echo "engine.sh: start or stop, not $verb" >&2; exit 2 ;;
esac
