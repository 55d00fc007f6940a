#!/bin/bash
# shellcheck disable=SC1091,SC2154  # hosts.sh, and what it sets
# Measures all-reduce across two hosts of two ranks: hier and gloo alternately, over four links.
#
#   tests/network/measure.sh [LINK...] [-- FLAGS...]    LINK is GBIT/MS; FLAGS of collectives_ranks
source "$(dirname "${BASH_SOURCE[0]}")/hosts.sh"

links=()
while (($#)) && [[ $1 != -- ]]; do links+=("$1"); shift; done
[[ ${1:-} == -- ]] && shift
((${#links[@]})) || links=(1/0.1 1/1 10/0.1 10/1)

for link in "${links[@]}"; do
  hosts_up "${link%/*}" "${link#*/}"
  echo "${link%/*} Gbit/s, ${link#*/} ms:"
  start_ranks 2 "$scratch/out" "$BIN/tests/network/collectives_ranks" --mode=measure "$@"
  wait_ranks || fail "$(tail -n 5 "$scratch"/out.*)"
  cat "$scratch/out.0"
  hosts_down
done
