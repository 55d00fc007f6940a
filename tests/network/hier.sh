#!/bin/bash
# shellcheck disable=SC1091,SC2154  # hosts.sh, and what it sets
# Backend hier on two hosts of two ranks: over several links its collectives give gloo's results,
# //tools:train reaches gloo's loss, and when a rank is killed all other ranks report it soon.
#
# Run as root, from anywhere. $BIN: where bazel has put the programs; without it, they are built.
source "$(dirname "${BASH_SOURCE[0]}")/hosts.sh"

ranks=$BIN/tests/network/collectives_ranks
show() { tail -n 5 "$1".*; }

# The loss of a run's last line, "test accuracy A loss L epochs N …".
loss_of() { sed -nE 's/^(.*] ?)?test accuracy [0-9.]+ loss ([0-9.]+) .*/\2/p' "$1"; }

train() {  # train BACKEND
  start_ranks 2 "$scratch/$1" "$BIN/tools/train" --launcher=torchrun --backend="$1" --model=mlp \
    --dataset=synthetic --batch_size=32 --max_steps=8 --seed=7 --log_dir="$scratch/log_$1"
  wait_ranks || fail "training with --backend=$1: $(show "$scratch/$1")"
}

for link in "1 0.1" "1 1" "10 0.1" "10 1"; do
  read -r gbit ms <<<"$link"
  hosts_up "$gbit" "$ms"
  start_ranks 2 "$scratch/compare" "$ranks" --mode=compare
  wait_ranks || fail "$gbit Gbit/s, $ms ms: $(show "$scratch/compare")"
  agree=$(cat "$scratch"/compare.* | grep -c "results are gloo's")
  [[ $agree == 4 ]] || fail "$gbit Gbit/s, $ms ms: $agree of 4 ranks compared their results with gloo's"
  say "$gbit Gbit/s, $ms ms: 4 ranks agree with gloo"
  hosts_down
done

hosts_up 1 0.1
train gloo
train hier
train auto
grep -q hier "$scratch"/auto.0 || fail "--backend=auto does not say that it took hier: $(show "$scratch/auto")"
gloo_loss=$(loss_of "$scratch/gloo.0")
for backend in hier auto; do
  loss=$(loss_of "$scratch/$backend.0")
  # Another order of addition: equal up to rounding.
  awk -v a="$gloo_loss" -v b="$loss" 'BEGIN { exit !(a > 0 && b > 0 && (a-b)^2 < (1e-3*a)^2) }' ||
    fail "loss '$loss' with --backend=$backend, '$gloo_loss' with gloo"
done
say "//tools:train: loss $loss, as with gloo"

for death in "2 hier 3" "2 hier 0" "1 gloo 1" "1 gloo 0"; do
  read -r per_host backend victim <<<"$death"
  start_ranks "$per_host" "$scratch/killed" "$ranks" --mode=until_failure --backend="$backend"
  for ((rank = 0; rank < 2 * per_host; ++rank)); do
    timeout 60 bash -c "until grep -q ready '$scratch/killed.$rank'; do sleep 0.1; done" ||
      fail "no start: $(show "$scratch/killed")"
  done
  began=$(date +%s%N)
  kill -9 "${rank_pids[victim]}"
  wait "${rank_pids[victim]}" 2>/dev/null
  for ((rank = 0; rank < 2 * per_host; ++rank)); do
    [[ $rank == "$victim" ]] && continue
    timeout 10 tail -s 0.05 --pid="${rank_pids[rank]}" -f /dev/null ||
      fail "rank $rank waits on, 10 s after rank $victim was killed"
    grep -q "^error: .*rank $victim has died" "$scratch/killed.$rank" ||
      fail "rank $rank: $(show "$scratch/killed")"
  done
  say "$backend, $per_host ranks a host, rank $victim killed: all others gave up within $((($(date +%s%N) - began) / 1000000)) ms"
  sed -n 's/^error: /    /p' "$scratch"/killed.* | cut -c1-400 >&2
  wait_ranks
  rm "$scratch"/killed.*
done
say "passed"
