#!/bin/bash
# Packs what check.sh needs on a machine with a GPU: bundle.sh OUTPUT_FOLDER
#
# A CUDA build, dynamically linked, for one version of torch: the pinned one, or that of
# LIBTORCH_PATH=/path/to/torch. Compiling and packing need no GPU. Less than 64 MiB.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.."
folder=${1:?usage: tests/gpu/bundle.sh OUTPUT_FOLDER}
targets=(//tests/gpu:device_test //tests/gpu:out_of_memory //tests/parity:train_on_hosts)

./bazelw build --config=cuda --noshow_progress "${targets[@]}"
bin=$(./bazelw info --config=cuda bazel-bin 2>/dev/null)
header=$(./bazelw info --config=cuda output_base 2>/dev/null)/external/libtorch/torch/include/torch/headeronly/version.h
number() { sed -n "s/^#define TORCH_VERSION_$1 //p" "$header"; }

rm -rf "$folder"
mkdir -p "$folder/bin"
for target in "${targets[@]}"; do
  program=${target#//}
  strip -o "$folder/bin/${target##*:}" "$bin/${program/://}"
done
cp tests/gpu/check.sh "$folder/"
echo "$(number MAJOR).$(number MINOR).$(number PATCH)" >"$folder/VERSION"
size=$(du -sm "$folder" | cut -f1)
((size < 64)) || { echo "bundle.sh: $folder has $size MiB, more than 64" >&2; exit 1; }
echo "$folder: $size MiB, for torch $(<"$folder/VERSION"); there: $folder/check.sh"
