#!/bin/bash
# A real mpirun starts two ranks: with the default backend, and with backend mpi.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need mpirun openmpi-bin
options=(-np 2 --oversubscribe)
if [[ $(id -u) == 0 ]]; then options+=(--allow-run-as-root); fi
mpirun "${options[@]}" "$TRAIN" "${steps[@]}" >"$scratch/out" 2>&1 ||
  fail "$(tail -n 20 "$scratch/out")"
expect_result "$scratch/out" mpi

# mpirun passes SIGTERM on after this time, and kills the ranks after as much again; SIGUSR1 it
# passes on at once.
stop_and_go_on TERM 1 mpi mpirun "${options[@]}" --mca odls_base_sigkill_timeout 2
stop_and_go_on USR1 138 mpi mpirun "${options[@]}"
expect_exit_codes 2 65 137 mpirun "${options[@]}"

# Backend mpi without the address of rank 0.
mpirun "${options[@]}" --bind-to none "$TRAIN" "${steps[@]}" --launcher=mpi --backend=mpi \
  --log_dir="$scratch/mpi_log" --checkpoint_dir="$scratch/mpi_checkpoint" >"$scratch/mpi" 2>&1 ||
  fail "--backend=mpi: $(tail -n 20 "$scratch/mpi")"
expect_result "$scratch/mpi" mpi
