#!/bin/bash
# Each line of the README's part "Launching" as it stands, but for options that make the run short:
# under the real launchers, SLURM's with two nodes (see slurm_cluster.sh). bazel-bin is that of the
# last build.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need mpirun openmpi-bin
need srun slurm-wlm
need munged munge
cd "$repository"
if [[ -n ${TORCHRUN:-} ]]; then
  # shellcheck disable=SC2317  # the line calls it
  torchrun() { $TORCHRUN "$@"; }
fi
# Root may use mpirun, and there are as many ranks as it asks for on any machine.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
export GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
source "$(dirname "${BASH_SOURCE[0]}")/slurm_cluster.sh"
trap 'slurm_cluster_down || true; rm -rf "$scratch"' EXIT
slurm_cluster_up || fail "there is no cluster"

mapfile -t lines < <(sed -n '/^## Launching$/,/^`/s/^    \([^#]*[^# ]\) *#.*/\1/p' README.md)
((${#lines[@]} >= 5)) || fail "the README has ${#lines[@]} launch lines"
for line in "${lines[@]}"; do
  rm -rf "$scratch/log" "$scratch/checkpoint"
  more='' ranks=2
  if [[ $line == *--launcher=slurm* ]]; then
    more="--slurm_wait --stage_dir=$scratch/stage" ranks=4  # two on each node: the default
  fi
  eval "$line ${steps[*]} $more" >"$scratch/out" 2>&1 || fail "$line: $(tail -n 20 "$scratch/out")"
  [[ $line == *--nproc_per_node=1 ]] || grep -q "rank 0 of $ranks," "$scratch/out" ||
    fail "$line: not $ranks ranks: $(tail -n 20 "$scratch/out")"
  [[ -n $(result_of "$scratch/out") ]] || fail "$line: no result in $(tail -n 20 "$scratch/out")"
  say "passed: $line"
done
