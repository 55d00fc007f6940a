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

trap 'slurm_cluster_down; rm -rf "$scratch"' EXIT
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

# wait_for COMMAND…: until it succeeds, for a minute.
wait_for() {
  local deadline=$((SECONDS + 60))
  until "$@"; do
    ((SECONDS < deadline)) || fail "this did not become true: $*"
    sleep 0.1
  done
}

# job_file NAME: a file of the newest job.
job_file() {
  local folders=(slurm_stage/jobs/*)
  # shellcheck disable=SC2012  # our own names
  echo "slurm_stage/jobs/$(ls -t slurm_stage/jobs | head -n 1)/$1"
  [[ -e ${folders[0]} ]]
}

jobs_in_queue() { squeue --noheader --array --format=%i | wc -l; }
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
wait_for test -e "$(job_file exit_code)"
[[ $(cat "$(job_file exit_code)") == 0 ]] || fail "$(cat "$(job_file job.log)")"
expect "rank 1/2 local 1/2 node 0 master 127.0.0.1:20" "$(job_file job.log)"
say "a job that is not waited for leaves its exit code"

# A rebuild changes no job that waits. (--hold: until scontrol releases it.)
cp -rL "$bin/launchers/whoami" "$bin/launchers/whoami.runfiles" "$scratch"
submit 0 "$scratch/whoami" --launcher=slurm --slurm_extra=--hold
printf '#!/bin/bash\necho the rebuilt one; exit 9\n' >"$scratch/new"
chmod +x "$scratch/new"
find "$scratch" -maxdepth 4 -path '*whoami*' -name whoami -type f ! -path '*/builds/*' \
  -exec cp --remove-destination "$scratch/new" {} \;
[[ $("$scratch/whoami") == "the rebuilt one" ]] || fail "the program was not replaced"
scontrol release "$(cat "$(job_file job_id)")"
wait_for test -e "$(job_file exit_code)"
[[ $(cat "$(job_file exit_code)") == 0 ]] || fail "$(cat "$(job_file job.log)")"
expect "rank 0/1" "$(job_file job.log)"
say "a rebuild changes no queued job"

# What a user may get wrong.
before=$(find slurm_stage/jobs | wc -l)
submit 1 "$whoami" --launcher=slurm --slurm_partition=nowhere
expect "nvalid partition" "$err"
one_line
PATH=/nowhere submit 1 "$whoami" --launcher=slurm 2>/dev/null || true
