#!/bin/bash
# The command line of ckpt: exit codes, one line per error, JSON.
set -u
ckpt=tools/ckpt
file=checkpoint/safetensors/testdata/epoch_2.safetensors
failed=0

# expect CODE PATTERN ARGUMENTS: exit code, and what stdout and stderr have.
expect() {
  local code=$1 pattern=$2 out got
  shift 2
  out=$("$ckpt" "$@" 2>&1)
  got=$?
  if [ $got != "$code" ] || ! grep -qE -- "$pattern" <<< "$out"; then
    echo "ckpt $*: exit code $got, expected $code and '$pattern':"
    echo "$out"
    failed=1
  fi
}

# One line on stderr, nothing on stdout.
expect_one_line() {
  local out
  expect 2 "$@"
  shift
  out=$("$ckpt" "$@" 2>/dev/null)
  if [ -n "$out" ] || [ "$("$ckpt" "$@" 2>&1 | wc -l)" != 1 ]; then
    echo "ckpt $*: no single line"
    failed=1
  fi
}

expect 0 'ckpt convert FROM TO' --help
expect 2 'ckpt convert FROM TO'
expect_one_line 'verfy. is no command; .*did you mean verify' verfy "$file"
expect_one_line 'ls takes DIR or FILE, and not 2 arguments' ls a b
expect_one_line 'avrage. is no command; .*did you mean average' avrage "$file" "$file"
expect_one_line 'ls takes no --quarantine' ls --quarantine "$file"
expect_one_line 'average needs --to' average "$file" "$file"
expect_one_line 'average takes A B ..., and not 1 argument$' average "$file" --to=x.pt
expect_one_line 'pin takes DIR NAME, and not 1 argument$' pin "$TEST_TMPDIR"
expect_one_line 'unknown|jsn' ls --jsn "$file"
expect_one_line 'none.pt' ls "$TEST_TMPDIR/none.pt"
expect_one_line 'none.pt' verify "$TEST_TMPDIR/none.pt"
expect_one_line 'to=hdf5 is none of' convert "$file" "$TEST_TMPDIR/x" --to=hdf5
expect_one_line 'takes --only once' convert "$file" "$TEST_TMPDIR/x.pt" --only=a --only=b
expect_one_line 'only=x is|only=x matches' convert "$file" "$TEST_TMPDIR/x.pt" --only=x

expect 0 'DTYPE' ls "$file"
expect 0 ': ok' verify "$file"
expect 0 'wrote' convert "$file" "$TEST_TMPDIR/a.safetensors" --to=safetensors
expect 0 'equal' diff "$file" "$TEST_TMPDIR/a.safetensors"
expect 0 'wrote' convert "$file" "$TEST_TMPDIR/a.pt"
expect 0 'equal' diff "$file" "$TEST_TMPDIR/a.pt"
mkdir "$TEST_TMPDIR/python"
# Of the model alone: torch.distributed.checkpoint makes text of the optimizer's int keys.
expect 0 'wrote' convert "$file" "$TEST_TMPDIR/python/model.pt" --only='model/*'
expect 0 'wrote' convert "$TEST_TMPDIR/python/model.pt" "$TEST_TMPDIR/python/a" --to=dcp
expect 0 'equal' diff "$TEST_TMPDIR/python/model.pt" "$TEST_TMPDIR/python/a"
expect 0 ': unverified' verify "$TEST_TMPDIR/python/a"
expect 0 'a.safetensors +.*safetensors +complete' ls "$TEST_TMPDIR"
expect 0 'the mean of 2 checkpoints' average "$file" "$TEST_TMPDIR/a.pt" --to="$TEST_TMPDIR/mean.pt"
expect 0 'a.safetensors is pinned' pin "$TEST_TMPDIR" a.safetensors
expect 0 'a.safetensors .* pinned' ls "$TEST_TMPDIR"
expect 0 'a.safetensors is not pinned' unpin "$TEST_TMPDIR" a.safetensors
expect_one_line 'has no checkpoint .a.safetensor.; did you mean a.safetensors' pin "$TEST_TMPDIR" a.safetensor
expect 1 'only in the' diff "$file" "$TEST_TMPDIR/a.safetensors/model.safetensors"
truncate -s -1 "$TEST_TMPDIR/a.safetensors/training_state"
expect 1 'damaged' verify "$TEST_TMPDIR/a.safetensors"
expect 0 '"state": "damaged"' ls --json "$TEST_TMPDIR"
expect 1 'renamed to a.safetensors.damaged' verify --quarantine "$TEST_TMPDIR"
[ -d "$TEST_TMPDIR/a.safetensors.damaged" ] || { echo "not renamed"; failed=1; }
expect 0 'a.safetensors.damaged .* damaged' ls "$TEST_TMPDIR"
# As a run that rolls back renames it.
mv "$TEST_TMPDIR/a.pt" "$TEST_TMPDIR/a.pt.abandoned"
expect 0 'a.pt.abandoned .* abandoned' ls "$TEST_TMPDIR"
expect_one_line 'there is no folder .*/missing in which' convert "$file" "$TEST_TMPDIR/missing/x.pt"
# What a killed one has left, the next one removes.
mkdir "$TEST_TMPDIR/killed"
touch "$TEST_TMPDIR/killed/.x.pt.tmp-0123456789abcdef"
touch "$TEST_TMPDIR/killed/.other.x.pt.tmp-0123456789abcdef" "$TEST_TMPDIR/killed/.epoch_1.pt.json"
before=$(ls -A "$TEST_TMPDIR/killed" | grep -v '^[.]x[.]')
expect 0 'wrote' convert "$file" "$TEST_TMPDIR/killed/x.pt"
[ "$(ls -A "$TEST_TMPDIR/killed" | grep -v '^x.pt$')" = "$before" ] || { echo "killed: $(ls -A "$TEST_TMPDIR/killed")"; failed=1; }
# Interrupted within a write: it leaves nothing.
header='{"big":{"dtype":"F32","shape":[100000000],"data_offsets":[0,400000000]}}'
{ printf "\\$(printf %03o "${#header}")\\0\\0\\0\\0\\0\\0\\0"; printf '%s' "$header"; } > "$TEST_TMPDIR/big.safetensors"
truncate -s +400000000 "$TEST_TMPDIR/big.safetensors"
for to in x.pt x.sharded; do
  mkdir -p "$TEST_TMPDIR/to"
  "$ckpt" convert "$TEST_TMPDIR/big.safetensors" "$TEST_TMPDIR/to/$to" &
  pid=$!
  while kill -0 $pid 2> /dev/null && [ -z "$(ls -A "$TEST_TMPDIR/to")" ]; do sleep 0.01; done
  kill -TERM $pid
  wait $pid
  status=$?
  [ $status = 143 ] || { echo "convert to $to, stopped: status $status"; failed=1; }
  [ -z "$(ls -A "$TEST_TMPDIR/to")" ] || { echo "it left $(ls -A "$TEST_TMPDIR/to")"; failed=1; }
done
"$ckpt" ls --json "$file" | python3 -m json.tool > /dev/null || { echo "no JSON"; failed=1; }
exit $failed
