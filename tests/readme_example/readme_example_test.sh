#!/bin/bash
# The README's example equals the source of this program, which trains on two ranks.
set -euo pipefail
program=$1 source=$2 readme=$3

shown=$(awk '/^```cpp my_model.cc$/ {on = 1; next} /^```$/ {on = 0} on' "$readme")
if [[ "$shown" != "$(cat "$source")" ]]; then
  echo "README.md does not show tests/readme_example/my_model.cc as it is:"
  diff <(echo "$shown") "$source" || true
  exit 1
fi

last=$("$program" | tail -n 1)
echo "$last"
[[ "$last" =~ ^test\ accuracy\ 0\.9[0-9]+\ loss\ 0\.[0-9]+\ epochs\ 20\  ]]
