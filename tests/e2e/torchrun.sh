#!/bin/bash
# The real torchrun starts two ranks. $TORCHRUN: its command line (default: torchrun).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

read -r -a torchrun <<<"${TORCHRUN:-torchrun}"
need "${torchrun[0]}" "Python's torch (or set TORCHRUN)"
"${torchrun[@]}" --standalone --no-python --nproc_per_node=2 "$TRAIN" "${steps[@]}" \
  >"$scratch/out" 2>&1 || fail "$(tail -n 20 "$scratch/out")"
expect_result "$scratch/out" torchrun
stop_and_go_on TERM torchrun "${torchrun[@]}" --standalone --no-python --nproc_per_node=2
