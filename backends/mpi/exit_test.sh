#!/bin/bash
# exit_test.sh RUN_UNDER_MPIRUN RANK: however a rank ends, the job ends soon, and its status says so.
set -uo pipefail

run=$1
rank=$2
failures=0
out=$(mktemp)
trap 'rm -f "$out"' EXIT

# ends_with WAY STATUS TEXT: two ranks, of which rank 1 ends in this WAY, make an mpirun that ends
# with STATUS, long before the minute that a collective may take, and prints TEXT.
ends_with() {
  local began=$SECONDS status=0
  timeout 50 "$run" 2 "$rank" "$1" >"$out" 2>&1 || status=$?
  if [[ $status != "$2" ]] || ! grep -q -- "$3" "$out"; then
    echo "FAILED: $1: status $status, wanted $2 and '$3'; after $((SECONDS - began)) s:"
    cat "$out"
    failures=1
  else
    echo "passed: $1"
  fi
}

ends_with return 0 "rank 0 returns"
ends_with timeout 0 "rank 0 gave up"
ends_with fail 3 "exited with non-zero status"
ends_with kill 137 "signal 9"
ends_with hang 1 "waited 1s for the others in MPI_Finalize"

# Without mpirun there is nobody to wait for, and a word on how to start.
if env -u OMPI_COMM_WORLD_SIZE "$rank" return >"$out" 2>&1 || ! grep -q "mpirun -n N" "$out"; then
  echo "FAILED: without mpirun:"
  cat "$out"
  failures=1
else
  echo "passed: without mpirun"
fi
exit "$failures"
