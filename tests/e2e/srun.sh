#!/bin/bash
# A real SLURM of two nodes (both this machine: see slurm_cluster.sh) starts one rank on each, by
# srun. Stops, of srun and of the queue, are saved, and the same command goes on.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need srun slurm-wlm
need munged munge
# The nodes share only the loopback interface, which several nodes use only if it is named
# explicitly.
export GLOO_SOCKET_IFNAME=lo
# Both nodes have all cores of this machine.
export OMP_NUM_THREADS=1
source "$(dirname "${BASH_SOURCE[0]}")/slurm_cluster.sh"
trap 'slurm_cluster_down || true; rm -rf "$scratch"' EXIT
slurm_cluster_up || fail "there is no cluster"

timeout 300 srun -N2 -n2 "$TRAIN" "${steps[@]}" >"$scratch/out" 2>&1 || fail "$(tail -n 20 "$scratch/out")"
expect_result "$scratch/out" slurm

expect_exit_codes 2 65 137 srun -N2 -n2
stop_and_go_on USR1 138 slurm srun -N2 -n2
# scancel sends SIGTERM, and SIGKILL after KillWait.
ask_to_stop() { scancel --name=stopped; }
stop_and_go_on TERM 143 slurm srun -N2 -n2 --job-name=stopped
