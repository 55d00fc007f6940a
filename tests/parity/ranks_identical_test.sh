#!/bin/bash
# PROGRAM BACKEND: three ranks end with the same bits, and so does a second run.
set -euo pipefail
first=$("$1" "$2")
second=$("$1" "$2")
echo "$first"
[[ "$first" == "3 ranks, parameters "* && "$first" == "$second" ]]
