#!/bin/bash
# A real mpirun starts two ranks.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need mpirun openmpi-bin
options=(-np 2 --oversubscribe)
if [[ $(id -u) == 0 ]]; then options+=(--allow-run-as-root); fi
mpirun "${options[@]}" "$TRAIN" "${steps[@]}" >"$scratch/out" 2>&1 ||
  fail "$(tail -n 20 "$scratch/out")"
expect_result "$scratch/out"
