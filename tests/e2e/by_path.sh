#!/bin/bash
# Every program works when it is started by its path: from another folder, through a symlink, and
# without the environment variables that `bazel run` sets.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

mkdir "$scratch/run"
echo '{"step":10,"time":1.5,"train/loss":0.5}' >"$scratch/run/metrics.jsonl"

# Arguments of each program, for runs of a few seconds.
declare -A arguments=(
  [backends/conformance/rank]="--backend=gloo --filter=barrier"
  [backends/common/reduce_kernels_benchmark]="--benchmark_filter=/1024 --benchmark_min_time=0.001"
  [backends/watch/watch_benchmark]=""
  [checkpoint/crc32_benchmark]="--benchmark_min_time=0.001"
  [launchers/whoami]="--nproc_per_node=2"
  [tests/parity/ranks_identical]="shm"
  [tests/parity/train_on_hosts]="--backend=hier_pairs --nproc_per_node=3 --max_steps=1 --test_size=100"
  [tests/readme_example/cameras]=""
  [tests/readme_example/my_model]=""
  [tests/readme_example/own_step]=""
  [tools/bench/collectives]="--peers=none --sizes=4 --rounds=1"
  [tools/bench/compare_hooks]="--rounds=1 --steps=20 --hooks=allreduce,bf16_compress -- --test_size=100"
  [tools/bench/zero_rank]="--layers=2 --width=64 --steps=1"
  [tools/ckpt]="ls $repository/checkpoint/pt/testdata/epoch_2.pt"
  [tools/examples/gan]=""
  [tools/examples/own_loop]="$scratch/own_loop 1 2"
  [tools/examples/start_resume]="$scratch/example 1"
  [tools/generate]="--help"
  [tools/plan]="--memory=16GiB"
  [tools/plot]="$scratch/run"
  [tools/train]="--nproc_per_node=2 --max_steps=1 --test_size=100"
)
# Excluded: programs that a test, a script or mpirun starts, and those that fetch gigabytes.
others=(ddp/config/testing_program ddp/session/run_test_main ddp/trainer/failure_test_main ddp/trainer/guard/guard_test_main backends/mpi/collectives_test_ranks backends/mpi/exit_test_rank
  backends/mpi/mpi_backend_test_ranks launchers/local/testing_program launchers/slurm/testing_array tests/bad_input/throwing_rank tests/ddp_over_mpi/ranks
  tests/interop/checkpoint_peer tests/interop/dcp_peer tests/interop/hooks_peer tests/interop/join_peer tests/interop/metrics_peer tests/interop/sampler_peer
  tests/interop/tensorboard_peer tests/gpu/out_of_memory tests/resume/gan
  tests/network/cable tests/network/collectives_ranks tools/bench/checkpoint tools/bench/checkpoint_rank tools/bench/collectives_rank tools/bench/collectives_with_oneccl
  tools/bench/intelmpi_peer tools/bench/loader tools/bench/loader_rank tools/bench/mpi_peer tools/bench/oneccl_peer
  tools/bench/train_vs_python tools/bench/zero_vs_python)

cd "$repository"
mapfile -t programs < <(./bazelw query --noshow_progress --keep_going 2>/dev/null \
  'kind("(cc|sh|py)_binary", //...)' | sed 's|^//||; s|:|/|' | sort)
[[ " ${programs[*]} " == *" tools/train "* ]] || fail "the query for programs gave: ${programs[*]}"
for program in "${programs[@]}"; do
  [[ -v arguments[$program] || " ${others[*]} " == *" $program "* ]] ||
    fail "$program is in neither list of this script"
done

mapfile -t programs < <(printf '%s\n' "${!arguments[@]}" | sort)
mapfile -t labels < <(printf '%s\n' "${programs[@]}" | sed 's|^\(.*\)/|//\1:|')
./bazelw build --noshow_progress "${labels[@]}" || fail "the build"
bin=$(./bazelw info bazel-bin 2>/dev/null)
mkdir "$scratch/elsewhere" "$scratch/links"
cd "$scratch/elsewhere"
for program in "${programs[@]}"; do
  link=../links/${program##*/}
  ln -s "$bin/$program" "$link"
  for path in "$bin/$program" "$link"; do
    # shellcheck disable=SC2086  # words
    env -i PATH="$PATH" "$path" ${arguments[$program]} >"$scratch/out" 2>&1 ||
      fail "$path ${arguments[$program]}: exit status $?: $(tail -n 20 "$scratch/out")"
    [[ -s $scratch/out ]] || fail "$path ${arguments[$program]} printed nothing"
  done
  say "$program works by its path and through a link"
done
[[ -z $(ls -A) ]] || fail "left behind where they were called: $(ls -A)"
say "passed"
