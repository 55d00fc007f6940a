#!/bin/bash
# One configuration, four ways: torchrun, a sweep here, a sweep as a SLURM array, and the run that the
# configuration in a log folder or a checkpoint repeats. $TORCHRUN and $PYTHON_TORCH (a Python with
# torch) as in .ci/run.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

read -r -a torchrun <<<"${TORCHRUN:-torchrun}"
need "${torchrun[0]}" "python3-torch, or set TORCHRUN"
need srun slurm-wlm
need munged munge
export GLOO_SOCKET_IFNAME=lo
# The same number of threads everywhere: it decides the order of sums.
export OMP_NUM_THREADS=1
cd "$scratch"

mkdir -p configs
cat >configs/base.yaml <<'YAML'
dataset: fashion_mnist
train_size: 2048
test_size: 256
batch_size: 32
epochs: 2
YAML
cat >configs/mlp.yaml <<'YAML'
defaults: [base]
model: mlp
lr: 0.05
nproc_per_node: 2
YAML

# 1. torchrun … --config_path --config_name
"${torchrun[@]}" --no-python --nnodes=1 --nproc_per_node=2 "$TRAIN" --config_path ./configs \
  --config_name mlp --log_dir=by_torchrun --checkpoint_dir=by_torchrun >out 2>&1 || fail "torchrun: $(tail -n 5 out)"
grep -q "launcher torchrun: rank 0 of 2" out || fail "torchrun was not detected: $(head -n 3 out)"

# What that run left repeats it: the file in its folder, and the text in its checkpoint.
newest() { find "$1" -name '*.pt' | sort -V | tail -n 1; }
"$TRAIN" --config=by_torchrun/config.yaml --log_dir=again --checkpoint_dir=again >out 2>&1 ||
  fail "from the log folder: $(tail -n 5 out)"
python=${PYTHON_TORCH:-python3}
cat >same.py <<'PY'
import sys, torch

def leaves(value, path=""):
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], "%s/%s" % (path, key))
    elif isinstance(value, (list, tuple)):
        for i, element in enumerate(value):
            yield from leaves(element, "%s/%d" % (path, i))
    else:
        yield path, value

a, b = (dict(leaves(torch.load(path))) for path in sys.argv[1:3])
assert a.keys() == b.keys() and len(a) > 10
for path, value in a.items():
    if path != "/config":
        same = torch.equal(value, b[path]) if torch.is_tensor(value) else value == b[path]
        assert same, path
PY
"$python" same.py "$(newest by_torchrun)" "$(newest again)" || fail "config.yaml repeats another run"
"$python" -c 'import sys, torch; print(torch.load(sys.argv[1])["config"])' "$(newest again)" >from_checkpoint.yaml
"$TRAIN" --config=from_checkpoint.yaml --log_dir=third --checkpoint_dir=third >out 2>&1 ||
  fail "from the checkpoint: $(tail -n 5 out)"
"$python" same.py "$(newest by_torchrun)" "$(newest third)" || fail "the checkpoint's config repeats another run"

# 2. --multirun here, two ranks a job.
"$TRAIN" --config_path=configs --config_name=mlp --multirun lr=0.05,0.01 --sweep_jobs=2 --log_dir=here \
  >out 2>err || fail "--multirun: $(tail -n 5 err out)"
[[ $(awk 'NR > 1 { print $2 }' out) == $'finished\nfinished' ]] || fail "--multirun: $(cat out)"
for job in here/lr=*; do
  [[ $(grep -c '^world_size: 2$' "$job/run.yaml") == 1 ]] || fail "$job: not two ranks: $(cat "$job/run.yaml")"
  [[ $(grep -c 'launcher local: .*this process starts the ranks' "$job/job.log") == 1 ]] ||
    fail "$job: its log does not say once that ranks were started: $(head -n 5 "$job/job.log")"
done
[[ $(find here -maxdepth 1 -name 'lr=*' | wc -l) == 2 ]] || fail "not two jobs: $(ls here)"

# While a job trains the report has its epoch and the time to its end, without lines of progress in its log.
running=("$TRAIN" --config_path=configs --config_name=mlp --multirun lr=0.05,0.01 epochs=100000 --noprogress --log_dir=running)
"${running[@]}" >running.out 2>&1 &
sweep_pid=$!
shows_epoch_and_time() {
  kill -0 "$sweep_pid" 2>/dev/null || fail "the sweep has ended: $(tail -n 5 running.out)"
  "${running[@]}" --sweep_report >out 2>err && grep -Eq 'running +[0-9]+/100000 +[0-9]+[smhd]' out
}
becomes_true shows_epoch_and_time
kill "$sweep_pid"
ended_with 143 "$sweep_pid" running.out
! grep -q 'epoch 1/100000 step' running/lr=*/job.log || fail "--noprogress shows progress"

# 3. --multirun --launcher=slurm: an array, two nodes a job. The first job is the run of 1.
sweep=("$TRAIN" --config_path=configs --config_name=mlp --multirun lr=0.05,0.01,0.02 --log_dir=array
  --launcher=slurm --nnodes=2 --nproc_per_node=1 --slurm_partition=main --stage_dir=stage --slurm_cpus_per_task=1)
cat >in_cluster.sh <<SH
set -e
$(printf '%q ' "${sweep[@]}") --slurm_wait >out 2>err
$(printf '%q ' "${sweep[@]}") --slurm_wait >out_again 2>err_again
SH
timeout 400 "$repository/tests/e2e/slurm_cluster.sh" run bash in_cluster.sh >cluster 2>&1 ||
  fail "the array: $(tail -n 20 cluster err out)"
[[ $(awk 'NR > 1 { print $2 }' out) == $'finished\nfinished\nfinished' ]] || fail "the array: $(cat out err)"
cmp out out_again || fail "a second call reports something else: $(cat out_again)"
[[ $(find stage/jobs -mindepth 1 -maxdepth 1 | wc -l) == 1 ]] || fail "not one array: $(ls stage/jobs)"
ids=$(cat array/*/job_id)
[[ $(sed 's/_.*//' <<<"$ids" | sort -u | wc -l) == 1 && $(wc -l <<<"$ids") == 3 ]] || fail "ids of the jobs: $ids"
"$python" same.py "$(newest by_torchrun)" "$(newest array/lr=0.05-*)" ||
  fail "a job of the array has other parameters than the same run under torchrun"
say "passed: $(sed -n 2p out)"
