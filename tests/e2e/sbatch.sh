#!/bin/bash
# Programs submit themselves to a real SLURM of two nodes (both this machine: see slurm_cluster.sh).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
# shellcheck source=tests/e2e/slurm_cluster.sh
source "$(dirname "${BASH_SOURCE[0]}")/slurm_cluster.sh"

need sbatch slurm-wlm
need munged munge
"$repository/bazelw" build --noshow_progress //launchers:whoami //launchers/slurm:testing_array ||
  fail "the build"
bin=$(cd "$repository" && ./bazelw info bazel-bin 2>/dev/null)
whoami=$bin/launchers/whoami
# The nodes share only the loopback interface.
export GLOO_SOCKET_IFNAME=lo

# With || errexit is off within, where a daemon that has ended already is no failure.
trap 'slurm_cluster_down || true; rm -rf "$scratch"' EXIT
slurm_cluster_up || fail "the cluster"
# A name that sbatch and bash must not take apart.
work="$scratch/it's a #1 folder of 100%"
mkdir "$work"
cd "$work"
out=$scratch/out err=$scratch/err

# submit CODE PROGRAM [ARGUMENT…]: runs it and expects this exit code.
submit() {
  local wanted=$1 code=0
  shift
  timeout 300 "$@" >"$out" 2>"$err" || code=$?
  [[ $code == "$wanted" ]] || fail "exit code $code instead of $wanted of $*: $(tail -n 20 "$out" "$err")"
}

# expect TEXT FILE…: one of the files has it.
expect() {
  grep -qF -- "$1" "${@:2}" || fail "no '$1' in: $(tail -n 20 "${@:2}")"
}

# one_line: the last command printed a single line on standard error.
one_line() { [[ $(wc -l <"$err") == 1 ]] || fail "not one line: $(cat "$err")"; }

# job_file NAME: a file of the newest job.
job_file() {
  # shellcheck disable=SC2012  # our own names, and by time
  echo "slurm_stage/jobs/$(ls -t slurm_stage/jobs | head -n 1)/$1"
}

# Without those that are over and are being cleaned up.
jobs_in_queue() { squeue --noheader --array --states=PENDING,RUNNING --format=%i | wc -l; }
queue_is_empty() { [[ $(jobs_in_queue) == 0 ]]; }

# Waits; both nodes take part; the log is copied.
submit 0 "$whoami" --launcher=slurm --nnodes=2 --slurm_wait
for rank in 0 1; do expect "rank $rank/2 local 0/1 node $rank" "$out"; done
expect "job 1: submitted" "$out"
for state in queued "ended with exit code 0"; do expect "job 1: $state" "$err"; done
[[ $(cat "$(job_file job_id)" "$(job_file exit_code)") == $'1\n0' ]] || fail "its files: $(ls -la slurm_stage/jobs/*)"
expect "/slurm_stage/builds/" "$(job_file job.sh)"
say "a job of two nodes can be waited for"

# Does not wait. What Bazel and other launchers export does no harm.
RUNFILES_DIR=/nowhere BUILD_WORKING_DIRECTORY=/nowhere MASTER_ADDR=nowhere MASTER_PORT=1 \
  submit 0 "$whoami" --launcher=slurm --nproc_per_node=2
becomes_true test -e "$(job_file exit_code)"
[[ $(cat "$(job_file exit_code)") == 0 ]] || fail "$(cat "$(job_file job.log)")"
expect "rank 1/2 local 1/2 node 0 master 127.0.0.1:20" "$(job_file job.log)"
say "a job that is not waited for leaves its exit code"

# A rebuild changes no job that waits. (--hold: until scontrol releases it.)
mkdir -p "$scratch/bin/whoami.runfiles/workspace/launchers"
cp "$whoami" "$scratch/bin/whoami"
ln -s ../../../whoami "$scratch/bin/whoami.runfiles/workspace/launchers/whoami"
submit 0 "$scratch/bin/whoami" --launcher=slurm --slurm_extra=--hold
printf '#!/bin/bash\nexit 9\n' >"$scratch/new"
chmod +x "$scratch/new"
mv -f "$scratch/new" "$scratch/bin/whoami"
scontrol release "$(cat "$(job_file job_id)")"
becomes_true test -e "$(job_file exit_code)"
[[ $(cat "$(job_file exit_code)") == 0 ]] || fail "$(cat "$(job_file job.log)")"
expect "rank 0/1" "$(job_file job.log)"
expect "/whoami.runfiles/workspace/launchers/whoami" "$(job_file job.sh)"
say "a rebuild changes no queued job"

# What a user may get wrong: one line, and nothing that looks submitted.
before=$(ls slurm_stage/jobs)
submit 1 "$whoami" --launcher=slurm --slurm_partition=nowhere
expect "Invalid partition name specified" "$err"
one_line
submit 1 env PATH=/nowhere "$whoami" --launcher=slurm
expect "finds no sbatch in PATH" "$err"
one_line
echo "a file" >file
submit 1 "$whoami" --launcher=slurm --slurm_stage_dir=file
expect "--slurm_stage_dir=file cannot be written: " "$err"
expect "Not a directory" "$err"
one_line
# salloc's shell need not be on a node of the job.
submit 1 salloc --quiet --nodes=1 --ntasks=1 "$whoami"
expect "this is the shell of salloc" "$err"
expect "srun --nodes=" "$err"
expect "launcher=local" "$err"
submit 0 "$whoami" --launcher=slurm --slurm_dry_run --nnodes=2 --slurm_time=5
expect "#SBATCH --nodes=2" "$out"
expect "#SBATCH --time=5" "$out"
bash -n "$out" || fail "the script is no bash"
[[ $(ls slurm_stage/jobs) == "$before" ]] || fail "jobs were left: $(ls slurm_stage/jobs)"
queue_is_empty || fail "jobs are queued: $(squeue)"
say "what cannot be submitted is refused"

# interrupted SIGNAL [ARGUMENT…]: sends SIGNAL while a job is waited for; expects the exit code 128 + SIGNAL's number.
interrupted() {
  local signal=$1 pid
  shift
  rm -f "$err"
  "$whoami" --launcher=slurm --slurm_wait --slurm_extra=--hold "$@" >"$out" 2>"$err" &
  pid=$!
  becomes_true grep -qs ": queued" "$err"
  kill "-$signal" "$pid"
  ended_with $((128 + $(kill -l "$signal"))) "$pid" "$err"
}
interrupted INT
id=$(cat "$(job_file job_id)")
expect "scancel $id" "$err"
[[ $(jobs_in_queue) == 1 ]] || fail "the job did not stay in the queue"
scancel "$id"
interrupted TERM --slurm_on_interrupt=cancel
expect "is cancelled" "$err"
becomes_true queue_is_empty
say "an interrupt leaves the job, or cancels it"

# A job that another cancels before it runs has no exit code.
rm -f "$err"
"$whoami" --launcher=slurm --slurm_wait --slurm_extra=--hold >"$out" 2>"$err" &
pid=$!
becomes_true grep -qs ": queued" "$err"
scancel "$(cat "$(job_file job_id)")"
ended_with 1 "$pid" "$err"
expect "is no longer in the queue and has no exit code" "$err"
expect "/job.log" "$err"
say "a job that vanishes is an error"

# An array: job I gets these words and I, and ends with code I; job 2 is cancelled while it runs.
cat >"$scratch/task" <<'TASK'
#!/bin/bash
# In a log, srun's words about a failed task may stand before or between those of the task.
printf '<%s>' "$@" >"words.${!#}"
printf '<%s>' "$@"; echo
if [[ ${!#} == 2 ]]; then exec sleep 600; fi
exit "${!#}"
TASK
chmod +x "$scratch/task"
words=("a b" "it's" '"' '$HOME' $'two\nlines' '' '\' '#SBATCH --nodes=9' '*' 'ü')
"$bin/launchers/slurm/testing_array" slurm_stage "$work/runs" 4 2 "$scratch/task" "${words[@]}" \
  >"$out" 2>"$err" &
pid=$!
becomes_true grep -qs "<2>" runs/2/job.log
becomes_true grep -qs "_2 running" "$out"
scancel "$(cat runs/2/job_id)"
wait "$pid" || fail "the array: $(cat "$out" "$err")"
for i in 0 1 2 3; do
  code=$i
  if ((i == 2)); then code=143; fi
  [[ $(cat "runs/$i/exit_code") == "$code" ]] || fail "job $i: $(tail -n 5 runs/$i/*)"
  expect "$(cat runs/$i/job_id) ended" "$out"
  [[ $(cat "words.$i") == "$(printf '<%s>' "${words[@]}" "$i")" ]] ||
    fail "arguments of job $i: $(cat "words.$i")"
  expect "<a b><it's><\"><\$HOME><two" "runs/$i/job.log"
  expect "<$i>" "runs/$i/job.log"
done
id=$(sed 's/_.*//' runs/0/job_id)
expect "${id}_3 queued" "$out"
expect "${id}_2 running" "$out"
expect "CANCELLED" runs/2/job.log
say "an array of jobs has a log and an exit code for each"

# A rank fails, and srun ends the other: the job's code is that of the first, not srun's.
mkdir "$scratch/failing"
chmod 777 "$scratch/failing"
submit 0 "$whoami" --launcher=slurm --slurm_dry_run --nnodes=2
sed -e "s|^ddp_folder=.*|ddp_folder=$scratch/failing|" -e "s|^ddp_command=.*|ddp_command=($scratch/failing/task)|" \
  "$out" >"$scratch/failing/job.sh"
# first_failure CODE COMMAND: rank 1 runs it.
first_failure() {
  printf '#!/bin/bash\nif ((SLURM_PROCID == 1)); then %s; fi\nexec sleep 600\n' "$2" >"$scratch/failing/task"
  chmod +x "$scratch/failing/task"
  submit "$1" sbatch --wait --output="$scratch/failing/log" "$scratch/failing/job.sh"
  [[ $(cat "$scratch/failing/exit_code") == "$1" ]] || fail "its files: $(tail "$scratch"/failing/*)"
}
first_failure 3 "exit 3"
first_failure 139 'kill -SEGV $$'
expect "error: rank 1 on 127.0.0.2 was killed by signal 11 (Segmentation fault)" "$scratch/failing/log"
say "the exit code is that of the rank that failed first"

# A shell of srun --pty is a task, but what runs in it is no rank; a task of another srun there is one.
need script bsdutils
cat >"$scratch/in_shell" <<SHELL
"$whoami" --nproc_per_node=2
srun --overlap --ntasks=1 "$whoami"
SHELL
submit 0 script --quiet --return --command "srun --pty --cpus-per-task=1 bash $scratch/in_shell" "$scratch/typescript"
expect "rank 1/2 local 1/2" "$out"
expect "[local: " "$out"
expect "[slurm: rank 0 of 1" "$out"
submit 0 script --quiet --return --command "srun --pty --ntasks=2 bash $scratch/in_shell" "$scratch/typescript"
expect "a shell of srun --pty with 2 tasks" "$out"
say "a shell of a task is no rank"

# Training: the same parameters, bit for bit, as ranks of the same command that srun starts.
run=("$TRAIN" "${steps[@]}" --launcher=slurm --nnodes=2 --nproc_per_node=1 --slurm_wait
  --log_dir=log --checkpoint_dir=checkpoint)
mkdir by_srun by_sbatch
cd by_srun
submit 0 srun -N2 -n2 "${run[@]}"
cd ../by_sbatch
submit 0 "${run[@]}"
cd ..
checkpoint=$(cd by_srun/checkpoint && ls -- *.pt)
cmp "by_srun/checkpoint/$checkpoint" "by_sbatch/checkpoint/$checkpoint" ||
  fail "the checkpoint is not that of srun"
expect_result "$out" slurm
# A program that fails in the job.
submit 2 "${run[@]}" --resume=/nowhere
expect "checkpoint.resume=/nowhere cannot be resumed from: " "$out"
expect "ended with exit code 2" "$err"
submit 65 "${run[@]}" --log_dir= --checkpoint_dir= --lr=1e30 --on_anomaly=stop
expect "ended with exit code 65" "$err"
say "training as a job is training"

# A stop: SLURM tells the ranks, in a job that goes on or is cancelled; they save. The same command
# goes on. The number of threads decides how sums are rounded: as launcher local sets it for two ranks.
export OMP_NUM_THREADS=1
run=("$TRAIN" "${stopping[@]}" --launcher=slurm --nnodes=2 --nproc_per_node=1 --slurm_wait
  --log_dir=log --checkpoint_dir=checkpoint)
for signal in USR1 TERM; do
  mkdir "stopped_by_$signal"
  cd "stopped_by_$signal"
  "${run[@]}" >"$out" 2>"$err" &
  pid=$!
  becomes_true has_taken_steps .
  if [[ $signal == USR1 ]]; then scancel --signal=USR1 "$(cat "$(job_file job_id)")"; else scancel "$(cat "$(job_file job_id)")"; fi
  code=$((128 + $(kill -l "$signal")))
  ended_with $code "$pid" "$out" "$err"
  [[ $(cat "$(job_file exit_code)") == "$code" ]] || fail "not $code: $(tail -n 5 "$(job_file job.log)" "$(job_file exit_code)")"
  expect_saved_stop "$(job_file job.log)" "$signal"
  becomes_true queue_is_empty
  submit 0 "${run[@]}"
  expect "resumed from checkpoint/" "$out"
  expect_result "$out" slurm --max_steps=4000
  cd ..
done
say "a stopped job is saved"

TOOLS=$(dirname "$TRAIN") python3 "$repository/tests/docs/docs_test.py" "$repository/docs/slurm.md" ||
  fail "docs/slurm.md shows what is not so"
say "passed"
