#!/bin/bash
# A page's example equals the source of this program, which trains on two ranks.
set -euo pipefail
program=$1 source=$2 page=$3 expected=$4

shown=$(awk -v fence="^\`\`\`cpp $(basename "$source")$" '$0 ~ fence {on = 1; next} /^```$/ {on = 0} on' "$page")
if [[ "$shown" != "$(cat "$source")" ]]; then
  echo "$page does not show $source as it is:"
  diff <(echo "$shown") "$source" || true
  exit 1
fi

last=$("$program" | tail -n 1)
echo "$last"
[[ "$last" =~ $expected ]]
