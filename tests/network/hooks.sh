#!/bin/bash
# shellcheck disable=SC1091,SC2154  # hosts.sh, and what it sets
# Measures a training step across two hosts of two ranks over backend hier, per communication hook.
#
#   tests/network/hooks.sh [LINK...] [-- FLAGS...]    LINK is GBIT/MS; FLAGS of //tools:train
source "$(dirname "${BASH_SOURCE[0]}")/hosts.sh"

links=()
while (($#)) && [[ $1 != -- ]]; do links+=("$1"); shift; done
[[ ${1:-} == -- ]] && shift
((${#links[@]})) || links=(1/0.1)

for link in "${links[@]}"; do
  hosts_up "${link%/*}" "${link#*/}"
  echo "${link%/*} Gbit/s, ${link#*/} ms:"
  for hook in allreduce bf16_compress powersgd noop allreduce bf16_compress powersgd noop; do
    rm -rf "$scratch/log"
    start_ranks 2 "$scratch/out" "$BIN/tools/train" --launcher=torchrun --backend=hier --model=mlp \
      --dataset=synthetic --batch_size=32 --epochs=1000 --max_steps=60 --seed=7 \
      --comm_hook="$hook" --comm_hook.powersgd.start_iter=2 --log_dir="$scratch/log" \
      --bench_json="$scratch/report" "$@"
    wait_ranks || fail "$hook: $(tail -n 5 "$scratch"/out.*)"
    python3 - "$hook" "$scratch" <<'PYTHON'
import json, sys

hook, scratch = sys.argv[1:]
volume = 0
for line in open(scratch + "/log/metrics.jsonl"):
    volume = json.loads(line).get("train/comm_bytes", volume)
report = json.load(open(scratch + "/report"))
print("%-16s %8.1f ms per step %10.1f KB per step, loss %.4f" % (
    hook, report["step_ms_median"], volume / 1e3, report["last_loss"]))
PYTHON
  done
  hosts_down
done
