#!/bin/bash
# Jobs that come back, on a real SLURM of two nodes (both this machine: see slurm_cluster.sh): each is
# interrupted, goes on, and ends with the bits of a run that was not.
#
#   tests/e2e/requeue.sh          the time limit, and scancel
#   tests/e2e/requeue.sh all      also preemption, two lost nodes, and a task of an array: some minutes
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=tests/e2e/slurm_cluster.sh
source "$(dirname "${BASH_SOURCE[0]}")/slurm_cluster.sh"

need sbatch slurm-wlm
need munged munge
# The nodes share only the loopback interface.
export GLOO_SOCKET_IFNAME=lo
# It decides the order of sums.
export OMP_NUM_THREADS=1

trap 'slurm_cluster_down || true; rm -rf "$scratch"' EXIT
# Jobs of partition high interrupt those of main.
# shellcheck disable=SC2034  # slurm_cluster_up reads it
slurm_cluster_more="PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=15
PartitionName=high Nodes=127.0.0.[1-2] MaxTime=60 State=UP PriorityTier=10"
slurm_cluster_up || fail "the cluster"
cd "$scratch"

run=("$TRAIN" --model=mlp --dataset=fashion_mnist --batch_size=32 --max_steps=2000 --log_every=1 --lr=0.05
  --seed=7 --checkpoint_every_steps=500 --log_dir=log --checkpoint_dir=checkpoint --resume=auto
  --launcher=slurm --nnodes=2 --nproc_per_node=1 --slurm_wait --slurm_requeue --slurm_time=30
  --slurm_signal=USR2@110)

# begin NAME [ARGUMENT…]: submits the run in a folder of its own, and follows it in the background.
begin() {
  mkdir -p "$scratch/$1"
  cd "$scratch/$1"
  rm -f out err
  "${run[@]}" "${@:2}" >out 2>err &
  follower=$!
  becomes_true grep -qs "submitted" out
  id=$(sed -n 's/^job \([0-9]*\): submitted.*/\1/p' out)
  folder=$(sed -n 's/^  log: *\(.*\)\/job.log$/\1/p' out)
}

# ends CODE: the job ends with it.
ends() {
  ended_with "$1" "$follower" out err
  [[ $(cat "$folder/exit_code") == "$1" ]] || fail "its file has $(cat "$folder/exit_code"), not $1"
}

steps_taken() { cat log/metrics.jsonl 2>/dev/null | grep -c train/loss || true; }
more_steps_than() { (($(steps_taken) > $1)); }
attempts_are() { [[ $(cat "$folder/attempts" 2>/dev/null | wc -l) == "$1" ]]; }

# The ranks of the job in this folder. A job has its options by their whole names.
job_ranks() {
  local pid
  for pid in $(processes 'checkpoint[.]dir=checkpoint'); do
    [[ $(readlink "/proc/$pid/cwd") != "$PWD" ]] || echo "$pid"
  done
}
has_two_ranks() { [[ $(job_ranks | wc -l) == 2 ]]; }

# SIGUSR2 waits for a rank that is stopped.
are_asked() {
  local pid pending
  for pid in $(job_ranks); do
    pending=$(sed -n 's/^ShdPnd:\t*//p' "/proc/$pid/status")
    ((0x$pending & 1 << 11)) || return 1
  done
}

# begin_again ID [CHANGE…]: SLURM lets a job that it begins again wait for two minutes.
waits_in_queue() { [[ $(squeue --noheader --format=%t --jobs="$1") == PD ]]; }
# A new life that begins before the last one's steps have ended is taken for ended with them.
has_left_its_nodes() { ! pgrep -f "^slurmstepd: \[$1[._]" >/dev/null; }
begin_again() {
  becomes_true waits_in_queue "$1"
  becomes_true has_left_its_nodes "$1"
  [[ ! -e $folder/exit_code ]] || fail "a job that is queued again has an exit code"
  scontrol update JobId="$1" StartTime=now "${@:2}"
}

# same_bits REFERENCE FOLDER: so have the last checkpoints in these folders.
same_bits() {
  local name
  name=$(cd "$1" && find . -name '*_step_2000.pt')
  [[ -n $name ]] || name=$(cd "$1" && ls -t -- *.pt | head -n 1)
  [[ -n $name ]] || fail "no checkpoint in $1"
  cmp "$1/$name" "$2/$name" || fail "$2 in $PWD has other bits"
}

# is_as_uninterrupted: the last checkpoint in this folder has the bits of the reference.
is_as_uninterrupted() {
  same_bits "$scratch/reference/checkpoint" checkpoint
  [[ $(steps_taken) == 2000 ]] || fail "metrics.jsonl has $(steps_taken) steps"
}

mkdir reference
cd reference
srun -N2 -n2 "${run[@]}" >out 2>&1 || fail "the reference: $(tail -n 20 out)"
is_as_uninterrupted

# Twice the job comes near its time limit, saves, and goes on. The ranks are stopped until SLURM asks
# them, so that it does not matter how fast they are.
begin limit
taken=0
for attempt in 1 2; do
  becomes_true attempts_are "$attempt"
  began=$SECONDS
  becomes_true more_steps_than "$taken"
  becomes_true has_two_ranks
  # shellcheck disable=SC2046  # words
  kill -STOP $(job_ranks)
  # One to two minutes are left then.
  scontrol update JobId="$id" TimeLimit=$(((SECONDS - began) / 60 + 2))
  becomes_true are_asked
  # shellcheck disable=SC2046  # words
  kill -CONT $(job_ranks)
  begin_again "$id" TimeLimit=30
  grep -q "stopped by signal USR2 after step" "$folder/job.log" || fail "it did not save: $(cat "$folder/job.log")"
  taken=$(steps_taken)
  ((taken < 2000)) || fail "it had ended before it was asked"
done
ends 0
attempts_are 3 || fail "attempts: $(cat "$folder/attempts")"
for text in "queued again, to go on" "attempt 3, restart 2"; do
  grep -q "$text" out || fail "its log lacks '$text': $(cat out)"
done
for text in running queued "ended with exit code 0"; do
  grep -q "job $id: $text" err || fail "not '$text': $(cat err)"
done
is_as_uninterrupted
say "a job goes on after its time limit, twice"

# A cancelled job saves and stays away; the same command goes on.
is_cancelled() { [[ $(squeue --noheader --states=all --format=%T --jobs="$id") == CANCELLED ]]; }
begin cancelled
becomes_true more_steps_than 0
scancel "$id"
ends 143
grep -q "stopped by signal TERM after step" out || fail "it did not save: $(cat out)"
becomes_true is_cancelled
(($(steps_taken) < 2000)) || fail "it had ended before it was cancelled"
begin cancelled
ends 0
is_as_uninterrupted
say "a cancelled job is not queued again"
[[ ${1:-} == all ]] || { say "passed"; exit; }

begin preempted
becomes_true more_steps_than 0
sbatch --partition=high --nodes=2 --exclusive --output=/dev/null --wrap="sleep 3" >/dev/null
begin_again "$id"
ends 0
attempts_are 2 || fail "attempts: $(cat "$folder/attempts")"
is_as_uninterrupted
say "a preempted job goes on"

# The other node's rank is still there when SLURM believes it lost, and ends as its peer is gone. The
# ranks are stopped until then, so that they do not end before.
is_interrupted() { [[ $(squeue --noheader --format=%t --jobs="$1") != R ]]; }
begin lost
becomes_true more_steps_than 0
# shellcheck disable=SC2046  # words
kill -STOP $(job_ranks)
slurm_cluster_stop_node 127.0.0.2
becomes_true is_interrupted "$id"
for pid in $(job_ranks); do kill -CONT "$pid" || true; done
becomes_true waits_in_queue "$id"
slurm_cluster_start_node 127.0.0.2
sleep 5
begin_again "$id"
ends 0
attempts_are 2 || fail "attempts: $(cat "$folder/attempts")"
is_as_uninterrupted
say "a job goes on after a node was lost"

# All that runs on the node ends with it: its daemon, the step's, and the rank. The job waits for the
# node, and begins as that comes back: SLURM 22.05 then has no room for the ranks' step in this life.
begin gone
becomes_true more_steps_than 0
for pid in $(job_ranks); do
  grep -qzx SLURMD_NODENAME=127.0.0.2 "/proc/$pid/environ" || continue
  shell=$(ps -o ppid= -p "$pid")
  # shellcheck disable=SC2046,SC2086  # words
  kill -KILL $(cat "$slurm_cluster_folder/node.127.0.0.2") $(ps -o ppid= -p $shell) $shell $pid
done
begin_again "$id"
slurm_cluster_start_node 127.0.0.2
ended() { ! kill -0 "$follower" 2>/dev/null; }
has_begun_again() { attempts_are 2; }
becomes_true has_begun_again
for ((i = 0; i < 200; ++i)); do
  ! ended || break
  if waits_in_queue "$id"; then begin_again "$id"; fi
  sleep 1
done
ends 0
is_as_uninterrupted
say "a job goes on after a node was lost with all that ran on it"

# Of an array one task is preempted. The same array, undisturbed, is its reference.
sweep=("${run[@]}" --multirun seed=7,8 --nnodes=1 --nproc_per_node=2 --log_dir=sweep --checkpoint_dir=)
mkdir "$scratch/undisturbed" "$scratch/array"
cd "$scratch/undisturbed"
"${sweep[@]}" >out 2>err || fail "the undisturbed array: $(cat out err)"
cd "$scratch/array"
"${sweep[@]}" >out 2>err &
follower=$!
both_run() { [[ $(cat sweep/*/metrics.jsonl 2>/dev/null | grep -c '"step":1,.*train/loss') == 2 ]]; }
becomes_true both_run
second=$(squeue --noheader --array --nodelist=127.0.0.2 --format=%i)
sbatch --partition=high --nodelist=127.0.0.2 --exclusive --output=/dev/null --wrap="sleep 3" >/dev/null
folder=$(dirname "$(grep -lxF "$second" sweep/*/job_id)")
begin_again "$second"
wait "$follower" || fail "the array: $(cat out err)"
for file in sweep/*/attempts; do
  wanted=1
  if [[ $file == "$folder/attempts" ]]; then wanted=2; fi
  [[ $(wc -l <"$file") == "$wanted" ]] || fail "$file: $(cat "$file")"
done
[[ $(awk 'NR > 1 { print $2 }' out) == $'finished\nfinished' ]] || fail "the array: $(cat out)"
for folder in sweep/*/checkpoints; do same_bits "$scratch/undisturbed/$folder" "$folder"; done
(cd "$scratch/undisturbed" && ls -d sweep/*/checkpoints) | cmp - <(ls -d sweep/*/checkpoints) || fail "other jobs: $(ls sweep)"
say "one task of an array goes on, with the same bits"
say "passed"
