#!/bin/bash
# Sourced by the scripts of this folder: a short training run for different launchers, and its
# expected result.
#
# The scripts can be run from any folder:   tests/e2e/torchrun.sh
# $TRAIN names the program; if it is not set, ./bazelw builds //tools:train.

set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
this=$(basename "$0" .sh)

say() { echo "e2e $this: $*" >&2; }
fail() { say "FAILED: $*"; exit 1; }

# If a tool is missing, the check is reported as skipped.
need() {
  command -v "$1" >/dev/null || { say "SKIPPED: no $1 here; install Debian's $2"; exit 77; }
}

if [[ -z ${TRAIN:-} ]]; then
  "$repository/bazelw" build //tools:train
  TRAIN=$(cd "$repository" && ./bazelw info bazel-bin 2>/dev/null)/tools/train
fi

scratch=$(mktemp -d)
# What a failed check has left running ends with it.
trap 'jobs -p | xargs -r kill 2>/dev/null || true; rm -rf "$scratch"' EXIT

# Removes variables of a launcher that may have started this shell.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT

# 40 steps: with two ranks the same result under every launcher.
# shellcheck disable=SC2034  # used by those who source this
steps=(--model=mlp --dataset=fashion_mnist --batch_size=32 --max_steps=40 --lr=0.05 --seed=7
  --log_dir="$scratch/log" --checkpoint_dir="$scratch/checkpoint")

# Those of a run that is stopped and goes on.
# shellcheck disable=SC2034
stopping=("${steps[@]}" --max_steps=4000 --log_every=1 --resume=auto)

# The last line of a run without its time: "test accuracy A loss L epochs N".
result_of() {
  sed -nE 's/^(.*] ?)?(test accuracy [0-9.]+ loss [0-9.]+ epochs [0-9]+) wall .*/\2/p' "$1"
}

# becomes_true COMMAND…: until it succeeds, for two minutes.
becomes_true() {
  local deadline=$((SECONDS + 120))
  until "$@"; do
    ((SECONDS < deadline)) || fail "this did not become true: $*: $(show)"
    sleep 0.1
  done
}

# What is shown of a check that has waited in vain.
show() {
  if [[ -n ${SLURM_CONF:-} ]]; then squeue; fi
  tail -n 20 out err "$scratch"/{out,err,stopped,*.txt} 2>/dev/null
}

# has_taken_steps [FOLDER]: the run whose log is in FOLDER/log, has logged a step.
has_taken_steps() { grep -qs train/loss "${1:-$scratch}/log/metrics.jsonl"; }

# ended_with CODE PID FILE…: a process in the background, whose output is in the files, ends with this
# exit code.
ended_with() {
  local code=0
  wait "$2" || code=$?
  [[ $code == "$1" ]] || fail "exit code $code instead of $1: $(tail -n 20 "${@:3}")"
}

# exits_with CODE COMMAND…: its output is in $scratch/out then.
exits_with() {
  "${@:2}" >"$scratch/out" 2>&1 &
  ended_with "$1" $! "$scratch/out"
}

# processes PATTERN: those of the program, or of a copy of it, whose command lines have this.
processes() {
  local pid
  for pid in $(pgrep -f -- "$1"); do
    [[ $(readlink "/proc/$pid/exe") != */"${TRAIN##*/}" ]] || echo "$pid"
  done
}

# The ranks of the run whose log is in $scratch/log.
ranks() { processes "--log_dir=$scratch/log"; }

# expect_cause CODE: what a launcher says of the rank that failed first, where its exit code does not.
expect_cause() { :; }

# expect_exit_codes USAGE ANOMALY KILLED COMMAND…: COMMAND, which starts the ranks, ends with these codes
# after wrong options, an anomaly and SIGKILL of a rank (docs/launching.md).
expect_exit_codes() {
  local usage=$1 anomaly=$2 killed=$3 pid
  local small=("$TRAIN" --model=mlp --dataset=synthetic --train_size=512 --test_size=64)
  shift 3
  exits_with "$usage" "$@" "${small[@]}" --resume=/nowhere
  expect_cause 2
  exits_with "$anomaly" "$@" "${small[@]}" --lr=1e30 --on_anomaly=stop
  expect_cause 65
  rm -rf "$scratch/log" "$scratch/checkpoint"
  "$@" "$TRAIN" "${stopping[@]}" >"$scratch/out" 2>&1 &
  pid=$!
  becomes_true has_taken_steps
  kill -9 "$(ranks | tail -n 1)"
  ended_with "$killed" "$pid" "$scratch/out"
  expect_cause -9
  say "failed ranks end with exit codes $usage, $anomaly and $killed"
}

# expect_saved_stop FILE SIGNAL: checks that FILE, the output of a run, says so, and that the
# checkpoint which it names is there.
expect_saved_stop() {
  local saved
  saved=$(sed -nE "s/^(.*] ?)?stopped by signal $2 after step [0-9]+: saved (.*)/\\2/p" "$1" | tr -d '\r')
  [[ -n $saved ]] || fail "it does not say that it was stopped by $2: $(tail -n 20 "$1")"
  [[ -e $saved ]] || fail "there is no $saved"
}

# ask_to_stop SIGNAL PID: sends the signal to what has started the ranks. Scripts whose stops come
# from elsewhere have another one.
ask_to_stop() { kill "-$1" "$2"; }

# stop_and_go_on SIGNAL CODE LAUNCHER COMMAND…: starts the ranks, sends the signal to what has started
# them, and expects that they save and it ends with this exit code; then that the same command goes on to
# the end of the run.
stop_and_go_on() {
  local signal=$1 code=$2 launcher=$3 pid
  shift 3
  rm -rf "$scratch/log" "$scratch/checkpoint"
  "$@" "$TRAIN" "${stopping[@]}" >"$scratch/stopped" 2>&1 &
  pid=$!
  becomes_true has_taken_steps
  ask_to_stop "$signal" "$pid"
  ended_with "$code" "$pid" "$scratch/stopped"
  expect_saved_stop "$scratch/stopped" "$signal"
  "$@" "$TRAIN" "${stopping[@]}" >"$scratch/resumed" 2>&1 || fail "$(tail -n 20 "$scratch/resumed")"
  grep -q "resumed from $scratch/checkpoint/" "$scratch/resumed" || fail "it does not go on: $(cat "$scratch/resumed")"
  expect_result "$scratch/resumed" "$launcher" --max_steps=4000
  say "a stop by $signal is saved"
}

# expect_result FILE LAUNCHER [FLAG…]: checks that FILE, the output of a run of two ranks, says that
# LAUNCHER was detected, and ends with the result of the same run under launcher local.
expect_result() {
  grep -qE "launcher $2: rank 0 of 2," "$1" || fail "it does not say 'launcher $2: rank 0 of 2': $(head -n 5 "$1")"
  # A new run into a folder with checkpoints is refused.
  rm -rf "$scratch/reference_log" "$scratch/reference_checkpoint"
  "$TRAIN" "${steps[@]}" --launcher=local --nproc_per_node=2 --log_dir="$scratch/reference_log" \
    --checkpoint_dir="$scratch/reference_checkpoint" "${@:3}" >"$scratch/reference" 2>&1 ||
    fail "the reference run: $(tail -n 5 "$scratch/reference")"
  local wanted found
  wanted=$(result_of "$scratch/reference")
  found=$(result_of "$1")
  [[ -n $wanted ]] || fail "the reference run has no result: $(tail -n 5 "$scratch/reference")"
  [[ $(wc -l <<<"$found") == 1 && -n $found ]] ||
    fail "expected one result line, got '$found' in: $(tail -n 5 "$1")"
  [[ $found == "$wanted" ]] || fail "result '$found' is not our own launcher's '$wanted'"
  say "passed: $found"
}
