#!/bin/bash
# For the scripts of this folder, which source it: one short training run, to be started by
# different launchers, and what it must end with.
#
# Each of them is run from anywhere, by hand too:   tests/e2e/torchrun.sh
# $TRAIN names the program; without it, ./bazelw builds //tools:train first.

set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
this=$(basename "$0" .sh)

say() { echo "e2e $this: $*" >&2; }
fail() { say "FAILED: $*"; exit 1; }

# Where the tool is absent the check did not happen, and must not look as if it had.
need() {
  command -v "$1" >/dev/null || { say "SKIPPED: no $1 here; install Debian's $2"; exit 77; }
}

if [[ -z ${TRAIN:-} ]]; then
  "$repository/bazelw" build //tools:train
  TRAIN=$(cd "$repository" && ./bazelw info bazel-bin 2>/dev/null)/tools/train
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# A launcher of the shell that runs these checks is not the one they are about.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT

# 40 steps: at two ranks the same numbers whoever starts them.
# shellcheck disable=SC2034  # used by those who source this
steps=(--model=mlp --dataset=fashion_mnist --batch_size=32 --max_steps=40 --lr=0.05 --seed=7
  --log_dir="$scratch/log" --checkpoint_dir="$scratch/checkpoint")

# What a run ends with, less what depends on the clock: "test accuracy A loss L epochs N".
result_of() {
  sed -nE 's/^(.*] ?)?(test accuracy [0-9.]+ loss [0-9.]+ epochs [0-9]+) wall .*/\2/p' "$1"
}

# expect_result FILE LAUNCHER: FILE, the output of a run of two ranks, says that LAUNCHER's variables
# were recognised, and ends as the same run under our own launcher does.
expect_result() {
  grep -qE "launcher $2: rank 0 of 2," "$1" || fail "it does not say 'launcher $2: rank 0 of 2': $(head -n 5 "$1")"
  # A run into a folder that holds another run's checkpoints is refused.
  rm -rf "$scratch/reference_log" "$scratch/reference_checkpoint"
  "$TRAIN" "${steps[@]}" --launcher=local --nproc_per_node=2 --log_dir="$scratch/reference_log" \
    --checkpoint_dir="$scratch/reference_checkpoint" >"$scratch/reference" 2>&1 ||
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
