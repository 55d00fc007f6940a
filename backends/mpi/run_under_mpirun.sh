#!/bin/bash
# run_under_mpirun.sh RANKS PROGRAM [ARGUMENT...]: PROGRAM as RANKS processes of this machine, with
# nothing but loopback and shared memory, however small the machine: for tests. Exit status: that of
# mpirun, which is the first failure's.
set -euo pipefail

ranks=$1
shift
command -v mpirun >/dev/null || { echo "no mpirun here; install Debian's openmpi-bin" >&2; exit 1; }

# Open MPI's sockets lie below it, whose paths must be short.
scratch=$(mktemp -d /tmp/ddp_mpi.XXXXXX)
trap 'rm -rf "$scratch"' EXIT

# Settings of Open MPI, which other MPIs do not read: no ssh to other machines, more ranks than
# cores, ranks free to use all cores, no search for networks that a sandbox has not.
export OMPI_MCA_plm=isolated OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_hwloc_base_binding_policy=none
export OMPI_MCA_pml=ob1 OMPI_MCA_btl=${OMPI_MCA_btl:-self,vader} OMPI_MCA_orte_tmpdir_base=$scratch
# Shared memory is named by process ids, which are the same in two sandboxes with one /dev/shm.
export OMPI_MCA_btl_vader_backing_directory=$scratch
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

# Rank 0 reports for all; a failure of another shows in its output, and in the exit status.
# shellcheck disable=SC2016  # expanded in the ranks
as_rank='if [[ ${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}} != 0 ]]; then
           unset XML_OUTPUT_FILE
           export GTEST_BRIEF=1
         fi
         exec "$@"'
mpirun -n "$ranks" bash -c "$as_rank" bash "$@"
