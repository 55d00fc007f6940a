#!/bin/bash
# The real torchrun starts two ranks, starts them again after a failure, and goes on with one when an
# agent has died. $TORCHRUN: its command line (default: torchrun).
#   DDP_RESTARTS=N         kills of a random rank (default 2)
#   DDP_RESTARTS_SEED=N    decides which rank and when; the times are random all the same
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

read -r -a torchrun <<<"${TORCHRUN:-torchrun}"
need "${torchrun[0]}" "Python's torch (or set TORCHRUN)"
python=${PYTHON_TORCH:-python3}
two=("${torchrun[@]}" --standalone --no-python --nproc_per_node=2)
"${two[@]}" "$TRAIN" "${steps[@]}" >"$scratch/out" 2>&1 || fail "$(tail -n 20 "$scratch/out")"
expect_result "$scratch/out" torchrun

# Whatever the ranks' exit codes are, torchrun's is 1; theirs are in its report.
expect_cause() {
  grep -qE "exitcode +: $1 " "$scratch/out" || fail "its report has no exit code $1: $(tail -n 30 "$scratch/out")"
}

# torchrun repeats any failure. A run that is refused, since the folder is another one's, must not be
# taken for one that goes on.
exits_with 1 "${two[@]}" --max-restarts=1 "$TRAIN" "${steps[@]}"
expect_cause 2
if grep -q "resumed from" "$scratch/out"; then fail "it goes on with another run: $(cat "$scratch/out")"; fi
grep -qE "traceback : .*holds a run's checkpoints" "$scratch/out" ||
  fail "torchrun's report does not name the cause: $(tail -n 30 "$scratch/out")"
say "the cause is in torchrun's report"

expect_exit_codes 1 1 1 "${two[@]}"
stop_and_go_on TERM 1 torchrun "${two[@]}"

# rank_of AGENT RANK: the process id of a rank that this agent has started.
rank_of() {
  local pid
  for pid in $(pgrep -P "$1"); do
    if tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | grep -qx "RANK=$2"; then echo "$pid"; fi
  done
}

has_checkpoint() { compgen -G "$scratch/checkpoint/epoch_*_step_*.pt" >/dev/null; }

# A killed rank: all are started again, go on from their own checkpoint, and end with the bits of the
# run that nobody killed.
restarts=${DDP_RESTARTS:-2} seed=${DDP_RESTARTS_SEED:-$RANDOM}
RANDOM=$seed
say "$restarts kills, DDP_RESTARTS_SEED=$seed"
# Enough for all of them, whatever the machine does meanwhile.
last=$((500 * restarts))
long=("${steps[@]}" --epochs="$last" --max_steps="$last" --log_every=1 --checkpoint_every_steps=10 --keep_last=3)
rm -rf "$scratch/log" "$scratch/checkpoint"
"${two[@]}" "$TRAIN" "${long[@]}" >"$scratch/whole.txt" 2>&1 || fail "$(tail -n 30 "$scratch/whole.txt")"
mv "$scratch/checkpoint" "$scratch/whole"
rm -rf "$scratch/log"
"${two[@]}" --max-restarts="$restarts" "$TRAIN" "${long[@]}" >"$scratch/restarted.txt" 2>&1 &
agent=$!
steps_taken() { cat "$scratch"/log/metrics.jsonl 2>/dev/null | grep -c train/loss || true; }
has_taken() { (($(steps_taken) >= wanted)); }
has_rank() { [[ -n $(rank_of "$agent" "$rank") ]]; }
has_resumed() { (($(grep -c "resumed from $scratch/checkpoint/" "$scratch/restarted.txt") >= kills)); }
for ((kills = 1; kills <= restarts; ++kills)); do
  wanted=$(($(steps_taken) + 1 + RANDOM % 50)) rank=$((RANDOM % 2))
  becomes_true has_taken
  becomes_true has_checkpoint
  becomes_true has_rank
  kill -9 "$(rank_of "$agent" "$rank")"
  becomes_true has_resumed
done
wait "$agent" || fail "$(tail -n 30 "$scratch/restarted.txt")"
found=$(result_of "$scratch/restarted.txt")
[[ -n $found && $found == "$(result_of "$scratch/whole.txt")" ]] || fail "another result: $(tail -n 5 "$scratch"/{whole,restarted}.txt)"
name=$(cd "$scratch/whole" && find . -name "*_step_$last.pt")
[[ -n $name ]] || fail "the run has not saved its end: $(ls "$scratch/whole")"
cmp "$scratch/whole/$name" "$scratch/checkpoint/$name" || fail "other bits after $restarts kills, DDP_RESTARTS_SEED=$seed"
repeated=$(grep train/loss "$scratch/log/metrics.jsonl" | grep -oE '"step":[0-9]+' | sort | uniq -d | head -3)
[[ -z $repeated ]] || fail "steps are logged twice: $repeated"
say "$restarts killed ranks came back, with the same bits"

# An agent of two dies with its rank. The other goes on alone, from the checkpoint of both. The store of
# the rendezvous is a process of its own: that of an agent would end with it.
rm -rf "$scratch/log" "$scratch/checkpoint"
"$python" -c '
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)' >"$scratch/port" 2>"$scratch/store.txt" &
store=$!
becomes_true test -s "$scratch/port"
examples=16384 batch=16
# The agents start within 20 s of each other, and the one that is left waits as long for another.
elastic=("${torchrun[@]}" --nnodes=1:2 --nproc_per_node=1 --max-restarts=3 --rdzv-backend=c10d
  --rdzv-endpoint="127.0.0.1:$(cat "$scratch/port")" --rdzv-id=e2e --local-addr=127.0.0.1
  --rdzv-conf=is_host=false,keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=20 --no-python
  "$TRAIN" --model=mlp --dataset=synthetic --train_size=$examples --test_size=64 --batch_size=$batch --epochs=2
  --schedule=cosine --learning_rates --log_every=1 --checkpoint_every_steps=10 --resume=auto
  --log_dir="$scratch/log" --checkpoint_dir="$scratch/checkpoint")
"${elastic[@]}" >"$scratch/first.txt" 2>&1 &
first=$!
"${elastic[@]}" >"$scratch/second.txt" 2>&1 &
second=$!
becomes_true has_checkpoint
# Its rank is in a session of its own.
mapfile -t ranks < <(pgrep -P "$second")
kill -9 "$second" "${ranks[@]}"
wait "$first" || fail "$(tail -n 30 "$scratch/first.txt")"
kill "$store"
"$python" - "$scratch" $examples $batch <<'END' || fail "$(tail -n 30 "$scratch/first.txt")"
import json, re, sys

scratch, examples, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
text = open(scratch + "/first.txt").read() + open(scratch + "/second.txt").read()
assert re.search(r"launcher torchrun: rank 0 of 2,", text), "two ranks have not begun"
(sample, step), = set(re.findall(r"resumed from .*: epoch 0, example (\d+), step (\d+)", text))
sample, step = int(sample), int(step)
assert sample == 2 * batch * step, (sample, step)
records = [json.loads(line) for line in open(scratch + "/log/metrics.jsonl")]
steps = [r["step"] for r in records if "train/loss" in r]
# What was left of the epoch, and one more: each example once, by one rank.
ends = [r["step"] for r in records if "test/accuracy" in r]
assert ends == [step + (examples - sample) // batch, step + (2 * examples - sample) // batch], (ends, step, sample)
assert steps == list(range(1, ends[-1] + 1)), steps
rates = [value for r in records for name, value in r.items() if name.startswith("lr")]
assert rates[-1] < 0.01 * rates[0], rates[-1]
print("e2e torchrun: two ranks took %d steps, one the %d that were left" % (step, ends[-1] - step), file=sys.stderr)
END
say "a dead agent's examples are used by the others"
