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

# A stop by a signal is no end of the run, whether the program has got it or only one of its ranks.
job=""
trap '[[ -z $job ]] || kill -KILL "$job" 2>/dev/null || true' EXIT
# Without the lines of the program before, which the new one may be late to remove.
start() {
  rm -f "$TEST_TMPDIR/output"
  "$@" >"$TEST_TMPDIR/output" 2>&1 &
  job=$!
}
wait_until() {
  local deadline=$((SECONDS + 60))
  until "$@"; do
    ((SECONDS < deadline)) || fail "it never came to: $*"
    sleep 0.05
  done
}
expect_stopped() {
  local code=0
  wait "$job" || code=$?
  job=""
  [[ $code == 143 ]] || fail "$1 ends with $code after SIGTERM"
  grep -q 'stopped by signal TERM' "$TEST_TMPDIR/output" || fail "$1 does not say why it has ended"
}

start "$start_resume" "$TEST_TMPDIR/stopped" 100000
wait_until test -e "$TEST_TMPDIR/stopped/checkpoints/epoch_1.pt"
kill -TERM "$job"
expect_stopped start_resume

start "$gan"
wait_until grep -qs 'epoch 1: ' "$TEST_TMPDIR/output"
rank=""
for child in $(<"/proc/$job/task/$job/children"); do
  if grep -qz '^RANK=' "/proc/$child/environ"; then rank=$child; fi
done
[[ -n $rank ]] || fail "gan has no ranks"
kill -TERM "$rank"
expect_stopped gan
