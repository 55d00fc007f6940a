#!/bin/bash
# shellcheck disable=SC2015,SC2153
# Simulates two hosts by network namespaces with a cable between them. Sourced by the scripts of
# this folder.
#
#   hosts_up 1 0.1                       a cable of 1 Gbit/s and 0.1 ms, in each direction
#   start_ranks 2 out PROGRAM ARGS...    2 ranks on each host, as torchrun would start them; their
#                                        output in out.0 to out.3, their ids in ${rank_pids[@]}
#   hosts_down                           also at exit

set -uo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
this=$(basename "$0" .sh)
say() { echo "network $this: $*" >&2; }
fail() { say "FAILED: $*"; exit 1; }
skip() { say "SKIPPED: $*"; exit 77; }

hosts=("ddp$$a" "ddp$$b")
cable_pid=
rank_pids=()
scratch=$(mktemp -d)

[[ $(id -u) == 0 ]] || skip "only root can make network namespaces"
command -v ip >/dev/null || skip "no ip here; install Debian's iproute2"
[[ -c /dev/net/tun ]] || skip "no /dev/net/tun, which the cable is made of"
ip netns add "ddp$$try" 2>/dev/null && ip netns del "ddp$$try" ||
  skip "this machine makes no network namespaces"

if [[ -z ${BIN:-} ]]; then
  "$repository/bazelw" build //tests/network/... //tools:train || fail "the build"
  BIN=$(cd "$repository" && ./bazelw info bazel-bin 2>/dev/null)
fi

hosts_up() {
  local host number=1
  for host in "${hosts[@]}"; do
    ip netns add "$host" && ip -n "$host" link set lo up || fail "no namespace $host"
    # `ip netns exec` mounts these over /etc/hosts and /etc/resolv.conf: c10d looks up the name of
    # each peer, and no name server is reachable.
    mkdir -p "/etc/netns/$host"
    printf '127.0.0.1 localhost\n10.77.0.1 host0\n10.77.0.2 host1\n' >"/etc/netns/$host/hosts"
    : >"/etc/netns/$host/resolv.conf"
  done
  coproc CABLE { exec "$BIN/tests/network/cable" --ends="${hosts[0]}/eth0,${hosts[1]}/eth0" \
    --gbit_per_s="$1" --delay_ms="$2"; }
  cable_pid=$CABLE_PID
  local ready
  read -r -t 20 -u "${CABLE[0]}" ready && [[ $ready == ready ]] || fail "the cable does not work"
  for host in "${hosts[@]}"; do
    ip -n "$host" addr add "10.77.0.$number/24" dev eth0
    ip -n "$host" link set eth0 up
    number=$((number + 1))
  done
}

hosts_down() {
  local host
  if [[ -n $cable_pid ]]; then kill "$cable_pid"; wait "$cable_pid"; fi 2>/dev/null
  cable_pid=
  for host in "${hosts[@]}"; do
    ip netns del "$host" 2>/dev/null
    rm -rf "/etc/netns/$host"
  done
}

trap 'kill -9 "${rank_pids[@]}" 2>/dev/null; hosts_down; rm -rf "$scratch"' EXIT

start_ranks() {
  local per_host=$1 output=$2 rank host
  shift 2
  rank_pids=()
  for ((rank = 0; rank < 2 * per_host; ++rank)); do
    host=$((rank / per_host))
    # Each step execs the next, so that $! is the rank itself.
    ip netns exec "${hosts[host]}" env RANK=$rank WORLD_SIZE=$((2 * per_host)) \
      LOCAL_RANK=$((rank % per_host)) LOCAL_WORLD_SIZE="$per_host" GROUP_RANK=$host \
      MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 \
      "$@" >"$output.$rank" 2>&1 &
    rank_pids+=($!)
  done
}

# Waits for all ranks; false if one has failed.
wait_ranks() {
  local pid failed=0
  for pid in "${rank_pids[@]}"; do wait "$pid" || failed=1; done
  rank_pids=()
  return $failed
}
