#!/bin/bash
# Builds and runs the three programs of this workspace, which depends on the repository and uses
# single targets of it. Arguments are Bazel's startup options.
#   tests/external_workspace/check.sh [--output_base=DIR]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

fail() { echo "external_workspace: $*" >&2; exit 1; }

# Uses the repository's bazelw to find or install Bazel, but the workspace of this folder.
bazel=$(../../bazelw --print_bazel)
"$bazel" "$@" build //:own_loop //:own_model //:sum_ranks
bin=$("$bazel" "$@" info bazel-bin)

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

RANK=0 timeout 60 "$bin/own_model" "$scratch/store" >"$scratch/0" &
first=$!
RANK=1 timeout 60 "$bin/own_model" "$scratch/store" >"$scratch/1" || fail "own_model, rank 1"
wait "$first" || fail "own_model, rank 0"
cmp "$scratch/0" "$scratch/1" || fail "own_model's ranks differ"
awk '{ exit !($2 > 2.99 && $2 < 3.01 && $4 > -1.01 && $4 < -0.99) }' "$scratch/0" ||
  fail "own_model did not fit y = 3x - 1: $(cat "$scratch/0")"

timeout 60 "$bin/sum_ranks" --nproc_per_node=3 >"$scratch/sums" || fail "sum_ranks"
for rank in 0 1 2; do
  grep -q "rank $rank of 3: sum 3$" "$scratch/sums" || fail "sum_ranks: $(cat "$scratch/sums")"
done
# 5 steps are an epoch: 7 ends within the second.
timeout 60 "$bin/own_loop" "$scratch/parts" 7 || fail "own_loop, to step 7"
[[ -e $scratch/parts/step_7.pt ]] || fail "own_loop saved nothing at step 7"
timeout 60 "$bin/own_loop" "$scratch/parts" 15 || fail "own_loop, from step 7 to 15"
timeout 60 "$bin/own_loop" "$scratch/whole" 15 || fail "own_loop, 15 steps"
cmp "$scratch/parts/step_15.pt" "$scratch/whole/step_15.pt" || fail "own_loop resumed is another run"
! cmp -s "$scratch/parts/step_7.pt" "$scratch/whole/step_15.pt" || fail "own_loop trained nothing"

echo "external_workspace: three programs built and ran"
