#!/bin/bash
# A checkpoint of a program that was built with another version of LibTorch resumes.
#
#   TRAIN=…/train                          tests/e2e/other_libtorch.sh save FOLDER
#   TRAIN=…/train of the other version     tests/e2e/other_libtorch.sh resume FOLDER
#
# The run is stopped halfway. What the first program ends with is compared with what the second one
# does: equal results to the digits that are printed. Bits may differ between versions.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[[ $# == 2 && $1 =~ ^(save|resume)$ ]] || fail "usage: $0 save|resume FOLDER"
folder=$2

for format in pt sharded safetensors; do
  for stage in 0 1 2; do
    for precision in fp32 fp16; do
      name=$format-zero_$stage-$precision
      run=("$TRAIN" "${steps[@]}" --nproc_per_node=2 --optimizer=adamw --lr=0.001 --schedule=cosine
        --zero_stage="$stage" --precision="$precision" --format="$format" --log_dir=)
      if [[ $1 == save ]]; then
        "${run[@]}" --checkpoint_dir= >"$scratch/whole" 2>&1 || fail "$name: $(tail -n 20 "$scratch/whole")"
        mkdir -p "$folder/$name"
        result_of "$scratch/whole" >"$folder/$name/result"
        "${run[@]}" --checkpoint_dir="$folder/$name/checkpoint" --stop_at_step=20 >"$scratch/half" 2>&1 ||
          fail "$name: $(tail -n 20 "$scratch/half")"
        continue
      fi
      "${run[@]}" --checkpoint_dir="$folder/$name/checkpoint" --resume=auto >"$scratch/resumed" 2>&1 ||
        fail "$name: $(tail -n 20 "$scratch/resumed")"
      grep -q "resumed from .*, step 20" "$scratch/resumed" || fail "$name: it does not go on: $(cat "$scratch/resumed")"
      found=$(result_of "$scratch/resumed")
      wanted=$(cat "$folder/$name/result")
      [[ -n $wanted && $found == "$wanted" ]] || fail "$name: result '$found' is not '$wanted'"
      say "$name: $found"
    done
  done
done
say "passed: $1"
