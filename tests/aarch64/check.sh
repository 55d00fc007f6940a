#!/bin/bash
# Cross-compiles tests of backends/shm for AArch64 and runs them under emulation. Needs Debian's
# g++-aarch64-linux-gnu and qemu-user; exits with 77 without them.
#   tests/aarch64/check.sh
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.."

for program in aarch64-linux-gnu-g++ qemu-aarch64; do
  if ! command -v "$program" >/dev/null; then
    echo "aarch64: no $program: install g++-aarch64-linux-gnu and qemu-user" >&2
    exit 77
  fi
done

# Excludes tests that look at other processes or re-execute themselves: QEMU emulates /proc/self,
# pidfds and address space limits differently.
targets=(//backends/common:reduce_kernels_test //backends/shm/engine:engine_failure_test
  //backends/shm/engine:engine_test //backends/shm/engine:wait_model_test
  //backends/shm/memory:arena_test //backends/shm/memory:memory_limit_test)

# A separate output base for this compiler; compiled objects are in the disk cache.
base=$(mktemp -d)
bazel=(./bazelw "--output_base=$base" --max_idle_secs=60)
trap '"${bazel[@]}" shutdown; chmod -R u+w "$base"; rm -rf "$base"' EXIT
export CC=$PWD/tests/aarch64/gcc BAZEL_COMPILER=gcc
"${bazel[@]}" test --noshow_progress --keep_going \
  "--run_under=$(command -v qemu-aarch64) -L /usr/aarch64-linux-gnu" "${targets[@]}"
