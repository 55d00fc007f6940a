#!/bin/bash
# A single process without a launcher: world size 1.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

"$TRAIN" "${steps[@]}" --nproc_per_node=1 >"$scratch/out" 2>&1 || fail "$(tail -n 20 "$scratch/out")"
found=$(result_of "$scratch/out")
[[ $(wc -l <<<"$found") == 1 && -n $found ]] || fail "no result in: $(tail -n 5 "$scratch/out")"
# 40 steps of 32 examples each: not fully trained, but far better than chance.
awk '{ exit !($3 > 0.5) }' <<<"$found" || fail "it does not learn: $found"
say "passed: $found"
