#!/bin/bash
# Proves on one machine what depends on the device, and prints a table: what passed, what it skipped.
#
#   tests/gpu/check.sh                    in the folder that bundle.sh has packed, on a machine with an
#                                         NVIDIA GPU and the Python torch that the bundle names
#   tests/gpu/check.sh --device=cpu       the part that needs no GPU
#
# With one GPU, which two ranks share over gloo. Exit status: 0, or 1 if a check failed, or 2 if this
# machine cannot run the bundle.
set -uo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
device=cuda:0
for argument in "$@"; do
  case $argument in
    --device=cpu | --device=cuda:[0-9]) device=${argument#--device=} ;;
    *) echo "check.sh: no option '$argument'; there is --device=cpu or cuda:N" >&2; exit 2 ;;
  esac
done

# Programs: of the bundle, of Bazel's runfiles, or of bazel-bin.
program() {
  local place
  for place in "$here/bin/$1" "${TEST_SRCDIR:-}/${TEST_WORKSPACE:-}/$2" "$here/../../bazel-bin/$2"; do
    if [[ -x $place ]]; then
      echo "$place"
      return
    fi
  done
  echo "check.sh: no program $1; pack a bundle with tests/gpu/bundle.sh" >&2
  exit 2
}
train=$(program train_on_hosts tests/parity/train_on_hosts) || exit 2
device_test=$(program device_test tests/gpu/device_test) || exit 2
out_of_memory=$(program out_of_memory tests/gpu/out_of_memory) || exit 2

if [[ -f $here/VERSION ]]; then
  wanted=$(<"$here/VERSION")
  found=$(python3 -c 'import torch; print(torch.__version__)' 2>/dev/null || echo none)
  if [[ ${found%%+*} != "$wanted" ]]; then
    echo "check.sh: this bundle is for torch $wanted; python3 here has: $found. Build another with" \
      "LIBTORCH_PATH (tests/gpu/bundle.sh)" >&2
    exit 2
  fi
  LD_LIBRARY_PATH=$(python3 -c 'import os, torch; print(os.path.dirname(torch.__file__))')/lib:${LD_LIBRARY_PATH:-}
  export LD_LIBRARY_PATH
fi
export OMP_NUM_THREADS=1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failed=0 table=()

# check NAME COMMAND...
check() {
  local name=$1 began=$SECONDS status=0
  shift
  "$@" >"$scratch/output" 2>&1 || status=$?
  if ((status == 0)); then
    row passed "$name" "$((SECONDS - began)) s"
    while read -r line; do row figure "${line#figure: }"; done < <(grep '^figure: ' "$scratch/output")
    while read -r line; do row skipped "$line"; done < <(sed -n 's/^\[  SKIPPED \] \([^ ,]*\) (.*/\1/p' "$scratch/output")
  else
    row FAILED "$name" "exit status $status"
    tail -n 40 "$scratch/output"
    failed=$((failed + 1))
  fi
}
row() {
  table+=("$(printf '%-8s %s' "$1" "${*:2}")")
  echo "${table[-1]}" >&2  # a check that hangs is the one after the last row
}
on_gpu() { if [[ $device == cpu ]]; then row skipped "$1: needs a GPU"; else check "$@"; fi; }

# Two processes.
library() {
  local store
  store=$(mktemp -d "$scratch/library.XXXXXX")/store
  library_rank 1 >"$store.output" 2>&1 &
  library_rank 0 && wait $! && return
  wait
  cat "$store.output"
  return 1
}
library_rank() {
  timeout 120 env DDP_TEST_DEVICE="$device" DDP_TEST_RANK="$1" DDP_TEST_STORE="$store" "$device_test" --gtest_brief=1
}

common=(--dataset=synthetic --train_size=512 --test_size=128 --batch_size=16 --log_dir= --lr=0.05)

# Each check would fail without the GPU.
if [[ $device != cpu ]]; then
  status=0
  timeout 60 "$train" "${common[@]}" --device="$device" --backend=gloo --nproc_per_node=1 --max_steps=1 \
    >"$scratch/output" 2>&1 || status=$?
  if ((status == 2)) && grep -q 'no usable GPU\|beyond the .* GPUs' "$scratch/output"; then
    cat "$scratch/output" >&2
    echo "check.sh: there is no $device here; the checks that need no GPU: --device=cpu" >&2
    exit 2
  fi
fi

steps() { timeout 60 "$train" "${common[@]}" --device="$device" --backend=gloo --nproc_per_node=2 "$@"; }

# resumes STAGE FORMAT OPTION...: ends as the uninterrupted run does, bit for bit: weights, optimizer,
# generators of the device.
resumes() {
  local stage=$1 format=$2 folder
  folder=$(mktemp -d "$scratch/resume.XXXXXX")
  local run=(--model=dropout --zero_stage="$stage" --optimizer=adamw --checkpoint_format="$format" "${@:3}")
  steps "${run[@]}" --max_steps=12 --checkpoint_dir="$folder/whole" || return
  steps "${run[@]}" --max_steps=12 --stop_at_step=5 --checkpoint_dir="$folder/parts" || return
  steps "${run[@]}" --max_steps=12 --checkpoint_dir="$folder/parts" --resume=auto || return
  same_tensors "$folder/whole/epoch_0_step_12.$format" "$folder/parts/epoch_0_step_12.$format"
}

# Of pt, a zip file: data/N are the bytes of its tensors; data.pkl has the run's options, too. Of sharded:
# all files but the manifest, which has these.
same_tensors() {
  if [[ -d $1 ]]; then
    [[ $(find "$1" -name 'rank_*' | wc -l) -ge 2 ]] || { echo "too few files: $(ls "$1")"; return 1; }
    diff -rq --exclude=manifest.json "$1" "$2"
    return
  fi
  python3 - "$@" <<'PYTHON'
import sys, zipfile
a, b = ({i.filename: (i.file_size, i.CRC) for i in zipfile.ZipFile(path).infolist() if "/data/" in i.filename}
        for path in sys.argv[1:])
if len(a) < 10 or a != b:
    sys.exit("%d tensors, %d of them differ" % (len(a), sum(a[name] != b.get(name) for name in a)))
PYTHON
}

# refuses STATUS TEXT COMMAND...: the command fails, with this text, within a minute.
refuses() {
  local wanted=$1 text=$2 status=0
  shift 2
  timeout 60 "$@" >"$scratch/refused" 2>&1 || status=$?
  cat "$scratch/refused"
  [[ $status == "$wanted" ]] || { echo "exit status $status, not $wanted"; return 1; }
  grep -q "$text" "$scratch/refused" || { echo "the output has no '$text'"; return 1; }
}

check "library: DDP, ZeRO, SyncBatchNorm, amp, hooks, fused" library
on_gpu "cuda and nccl, one rank" timeout 60 "$train" "${common[@]}" --model=cnn --device=cuda --backend=nccl \
  --nproc_per_node=1 --max_steps=20
check "two ranks over gloo, model cnn, SyncBatchNorm" steps --model=cnn --sync_bn=torch --max_steps=20
for precision in bf16 fp16; do
  check "precision $precision" steps --model=mlp --precision="$precision" --max_steps=10
done
for hook in bf16_compress fp16_compress powersgd; do
  check "hook $hook" steps --model=mlp --comm_hook="$hook" --max_steps=10
done
for stage in 0 1 2; do
  check "resumed equals uninterrupted, ZeRO stage $stage" resumes "$stage" pt
done
check "resumed equals uninterrupted, sharded and asynchronous saves" resumes 2 sharded --checkpoint_async \
  --checkpoint_every_steps=3 --checkpoint_check_staging
check "resumed equals uninterrupted, augmented batches, two workers" resumes 0 pt --augment=crop,flip --num_workers=2
on_gpu "no such GPU" refuses 2 "cuda:99" "$train" "${common[@]}" --device=cuda:99 --backend=gloo --nproc_per_node=1
[[ $device != cpu ]] || check "no GPU at all" refuses 2 "no usable GPU" "$train" "${common[@]}" \
  --device=cuda --nproc_per_node=1
[[ $device != cpu ]] || check "this script without a GPU" refuses 2 "there is no cuda:0 here" bash "$0"
check "out of memory on one rank" refuses 1 "rank 1" "$out_of_memory" "$device"

printf '%s\n' "${table[@]}"
((failed == 0))
