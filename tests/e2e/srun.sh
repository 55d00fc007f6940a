#!/bin/bash
# A real SLURM of two nodes (both this machine: see slurm_cluster.sh) starts one rank on each.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need srun slurm-wlm
need munged munge
# The nodes share only the loopback interface, which several nodes use only if it is named
# explicitly.
export GLOO_SOCKET_IFNAME=lo
timeout 300 "$(dirname "${BASH_SOURCE[0]}")/slurm_cluster.sh" run \
  srun -N2 -n2 "$TRAIN" "${steps[@]}" >"$scratch/out" 2>&1 || fail "$(tail -n 20 "$scratch/out")"
expect_result "$scratch/out" slurm
