#!/bin/bash
# A sweep of 12 jobs in a real SLURM of two nodes, of which one fails, one is killed and one is requeued
# while it runs: no job ever runs twice at a time, and the table is right at each moment. The jobs are
# those of //ddp/config:testing_program ($PROGRAM), which take seconds and no cores.
#   SWEEP_ROUNDS=N    so many sweeps, with others killed and requeued in each (default 1)
TRAIN=${TRAIN:-none}  # common.sh need not build it
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need srun slurm-wlm
need munged munge
if [[ -z ${PROGRAM:-} ]]; then
  "$repository/bazelw" build //ddp/config:testing_program
  PROGRAM=$(cd "$repository" && ./bazelw info bazel-bin 2>/dev/null)/ddp/config/testing_program
fi
cd "$scratch"

# squeue counts its calls: one per five seconds at most, however often the state is looked at.
mkdir bin
real=$(PATH=$PATH:/usr/sbin command -v squeue)
printf '#!/bin/bash\ndate +%%s.%%N >>%q/asked\nexec %q "$@"\n' "$scratch" "$real" >bin/squeue
chmod +x bin/squeue

{ declare -f becomes_true; cat <<'SH'; } >in_cluster.sh
set -euo pipefail
fail() { echo "FAILED: $*" >&2; exit 1; }
round=$1 killed=$2 requeued=$3
out=out$round
sweep=("$PROGRAM" --multirun --log_dir="$out" --launcher=slurm "--slurm_stage_dir=stage" "seed=range(0,12)"
  --seconds=8 --slow_from=6)
# Without the launcher's name.
here=("$PROGRAM" --multirun --log_dir="$out" "seed=range(0,12)" --seconds=8 --slow_from=6)
"${sweep[@]}" --print_config | sed -nE 's/^log_dir: "?([^"]*)"?$/\1/p' >folders
mapfile -t folders <folders
[[ ${#folders[@]} == 12 ]] || fail "not 12 jobs: $(cat folders)"
# Seed 2 cannot write its metrics.
mkdir -p "${folders[2]}/metrics.jsonl"

# states TABLE: "SEED STATE", sorted by seed.
states() { awk 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == "seed") s = i } NR > 1 { print $s, $2 }' "$1" | sort -n; }
state_of() { states "$1" | awk -v seed="$2" '$1 == seed { print $2 }'; }
report() {
  "${sweep[@]}" --sweep_report >"$1" 2>err || fail "the report: $(cat err)"
  [[ ! -s err ]] || fail "the report says more: $(cat err)"
}
starts() { cat "${folders[$1]}"/job.log* 2>/dev/null | grep -c '^pid ' || true; }
show() { squeue; tail -n 5 "$out"/*/job.log; }
runs() { grep -qs '^pid ' "${folders[$1]}/job.log"; }

# 1. The first call submits all.
"${sweep[@]}" >table 2>err || fail "the first call: $(cat err)"
grep -q '12 to run (12 missing)' err || fail "the first call says: $(cat err)"
[[ $(states table | grep -c ' queued$') == 12 ]] || fail "not 12 queued: $(cat table)"
becomes_true runs "$killed"
kill -9 "$(sed -nE 's/^pid ([0-9]+) .*/\1/p' "${folders[$killed]}/job.log")"
becomes_true runs "$requeued"
id=$(tail -n 1 "${folders[$requeued]}/job_id")
scontrol requeue "$id"
waits() { [[ $(squeue --noheader --format=%t --jobs="$id") == PD ]]; }
becomes_true waits
becomes_true test -s "${folders[$killed]}/exit_code"
becomes_true test -s "${folders[2]}/exit_code"

# 2. The table while some run: the requeued job waits, whatever its first life has left.
report table
[[ $(state_of table 2) == failed ]] || fail "seed 2: $(cat table)"
[[ $(state_of table "$killed") == failed ]] || fail "the killed one: $(cat table)"
[[ $(state_of table "$requeued") == queued ]] || fail "the requeued one: $(cat table)"
grep -q 'signal 9' table || fail "the table does not say what has killed it: $(cat table)"
ids=$(cat "$out"/*/job_id | sort)

# 3. The second call runs the two again, and nothing else.
rmdir "${folders[2]}/metrics.jsonl"
"${sweep[@]}" >table 2>err || fail "the second call: $(cat err)"
grep -q ' 2 to run (2 failed)' err || fail "the second call says: $(cat err)"
[[ $(comm -13 <(echo "$ids") <(cat "$out"/*/job_id | sort) | wc -l) == 2 ]] || fail "not two new: $(cat "$out"/*/job_id)"
[[ $(state_of table 2) == queued && $(state_of table "$killed") == queued ]] || fail "the second table: $(cat table)"
"${here[@]}" >table 2>err || fail "the call without a launcher: $(cat err)"
grep -q ' 0 to run' err || fail "the call without a launcher says: $(cat err)"
[[ $(state_of table "$requeued") == queued ]] || fail "the table without a launcher: $(cat table)"
# SLURM holds a requeued job for two minutes.
becomes_true scontrol update "jobid=$id" StartTime=now

# 4. A third, while they run, starts nothing, and waits for all.
: >"$ASKED"
began=$SECONDS
"${sweep[@]}" --slurm_wait >table 2>err || fail "the third call: $(cat err table)"
grep -q ' 0 to run' err || fail "the third call says: $(cat err)"
[[ $(states table | grep -c ' finished$') == 12 ]] || fail "not 12 finished: $(cat table)"
(($(wc -l <"$ASKED") <= (SECONDS - began) / 5 + 1)) || fail "squeue in $((SECONDS - began)) s: $(cat "$ASKED")"

# Which of its lives a job is in.
for seed in {0..11}; do
  case $seed in 2 | "$killed" | "$requeued") wanted=2 ;; *) wanted=1 ;; esac
  found=$(awk -v seed="$seed" 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i } $at["seed"] == seed { print $at["attempt"] }' table)
  [[ $found == "$wanted" ]] || fail "seed $seed is at attempt $found, not $wanted: $(cat table)"
done

# 5. Nothing is left to do, and each job ran as often as it had to.
"${sweep[@]}" >again 2>err || fail "the last call: $(cat err)"
cmp table again || fail "another table: $(diff table again)"
report again
cmp table again || fail "the report is another: $(diff table again)"
for seed in {0..11}; do
  case $seed in 2 | "$killed" | "$requeued") wanted=2 ;; *) wanted=1 ;; esac
  [[ $(starts "$seed") == "$wanted" ]] || fail "seed $seed ran $(starts "$seed") times, not $wanted"
done
SH

for ((round = 1; round <= ${SWEEP_ROUNDS:-1}; round++)); do
  PATH=$scratch/bin:$PATH PROGRAM=$PROGRAM ASKED=$scratch/asked timeout 500 \
    "$repository/tests/e2e/slurm_cluster.sh" run bash in_cluster.sh "$round" $((6 + round % 3)) $((9 + round % 3)) \
    >cluster 2>&1 || fail "round $round: $(tail -n 30 cluster)"
done
say "passed: $(sed -n 2p again)"
