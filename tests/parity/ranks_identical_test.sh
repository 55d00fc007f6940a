#!/bin/bash
# Three ranks end with the same bits, and a second run ends with those of the first.
set -euo pipefail
first=$("$1")
second=$("$1")
echo "$first"
[[ "$first" == "3 ranks, parameters "* && "$first" == "$second" ]]
