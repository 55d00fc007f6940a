#!/bin/bash
# The README's command with default options: test accuracy at least 0.90, in less than three minutes
# after the build. (The time is checked if $MAX_SECONDS is set.)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

mkdir "$scratch/caller"
cd "$scratch/caller"
"$repository/bazelw" run //tools:train -- --log_dir=log --checkpoint_dir=checkpoint \
  >"$scratch/out" 2>&1 || fail "$(tail -n 20 "$scratch/out")"
last=$(tail -n 1 "$scratch/out")
pattern='^test accuracy ([0-9.]+) loss [0-9.]+ epochs [0-9]+ wall ([0-9.]+) s$'
[[ $last =~ $pattern ]] || fail "the last line is '$last'"
awk -v accuracy="${BASH_REMATCH[1]}" 'BEGIN { exit !(accuracy >= 0.90) }' || fail "$last"
awk -v wall="${BASH_REMATCH[2]}" -v limit="${MAX_SECONDS:-1e9}" \
  'BEGIN { exit !(wall < limit) }' || fail "$last, more than $MAX_SECONDS s"
# Relative paths are relative to the caller's folder.
compgen -G "$scratch/caller/log/*" >/dev/null || fail "nothing was written to ./log"
compgen -G "$scratch/caller/checkpoint/*" >/dev/null || fail "nothing was written to ./checkpoint"
say "passed: $last"
