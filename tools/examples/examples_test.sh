#!/bin/bash
# The examples do what they say, also the second time and with other arguments.
set -euo pipefail
gan=$1 start_resume=$2 folder=$TEST_TMPDIR/run
fail() { echo "$1"; cat "$TEST_TMPDIR/output"; exit 1; }
output() { "$@" >"$TEST_TMPDIR/output" 2>&1; }

output "$gan" || fail "gan failed"
grep -qE '^test loss 0[.][01]' "$TEST_TMPDIR/output" || fail "the generator is far from the circle"

output "$start_resume" "$folder" 2 || fail "the first start failed"
[[ -e $folder/checkpoints/epoch_2.pt && -s $folder/metrics.jsonl ]] || fail "nothing is saved or logged"
output "$start_resume" "$folder" 3 || fail "going on failed"
grep -q 'resumed from .*epoch_2.pt' "$TEST_TMPDIR/output" || fail "it began anew"
[[ -e $folder/checkpoints/epoch_3.pt ]] || fail "epoch 3 is not saved"
for arguments in "" "$folder" "$folder many"; do
  # shellcheck disable=SC2086  # words
  if output "$start_resume" $arguments; then fail "accepted: '$arguments'"; fi
  grep -q 'usage: start_resume FOLDER EPOCHS' "$TEST_TMPDIR/output" || fail "no usage for '$arguments'"
done
