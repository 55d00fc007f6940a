#!/usr/bin/env bash
# Runs a command with a real SLURM cluster of two nodes on this machine.
#
#   tests/e2e/slurm_cluster.sh run srun -N2 -n2 hostname
#
#   source tests/e2e/slurm_cluster.sh
#   slurm_cluster_up            # sets SLURM_CONF; sinfo, srun, sbatch, scancel work from here on
#   sbatch --wait job.sh
#   slurm_cluster_down
#
# Lines in $slurm_cluster_more are added to slurm.conf. slurm_cluster_stop_node 127.0.0.2 kills a
# node's daemon, as if the node were lost, and slurm_cluster_start_node starts it again.
#
# Needs Debian's slurm-wlm and munge, but not their configuration or systemd: the cluster has its
# own key, sockets, ports, state and logs in a new folder under TMPDIR, which is removed afterwards.
# Runs as root or as an ordinary user. Both nodes are this machine with all its cores; their network
# is loopback. They are named 127.0.0.1 and 127.0.0.2, since the names in SLURM's node list must
# resolve.

slurm_cluster_folder=

# Prints $1 different free TCP ports outside of the ephemeral range and of the ports that the SLURM
# launcher gives to jobs.
slurm_cluster_free_ports() {
  python3 - "$1" <<'PY'
import random, socket, sys

held = []
while len(held) < int(sys.argv[1]):
    candidate = socket.socket()
    try:
        candidate.bind(("", random.randrange(30000, 32768)))
        held.append(candidate)
    except OSError:
        candidate.close()
print(*(s.getsockname()[1] for s in held))
PY
}

slurm_cluster_write_config() {
  local folder=$1 user host ports cpus
  # nproc takes OMP_NUM_THREADS for an answer.
  cpus=$(env -u OMP_NUM_THREADS nproc)
  user=$(id -un)
  host=$(hostname -s)
  read -r -a ports <<<"$(slurm_cluster_free_ports 3)"
  cat >"$folder/slurm.conf" <<CONF
ClusterName=ddp
SlurmctldHost=$host(127.0.0.1)
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
SlurmctldPort=${ports[0]}
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool.%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=5
NodeName=127.0.0.1 NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[1]} CPUs=$cpus
NodeName=127.0.0.2 NodeHostname=$host NodeAddr=127.0.0.2 Port=${ports[2]} CPUs=$cpus
PartitionName=main Nodes=127.0.0.[1-2] Default=YES MaxTime=60 State=UP OverSubscribe=YES
${slurm_cluster_more:-}
CONF
  # Files that slurmd would otherwise read from /etc/slurm.
  echo "CgroupPlugin=cgroup/v1" >"$folder/cgroup.conf"
}

# Starts a daemon in the foreground of a background job, so that its process id is known.
slurm_cluster_start() {
  "$@" >>"$slurm_cluster_folder/daemons.log" 2>&1 &
  echo $! >>"$slurm_cluster_folder/pids"
}

slurm_cluster_start_node() {
  slurm_cluster_start slurmd -D -N "$1"
  echo $! >"$slurm_cluster_folder/node.$1"
}

slurm_cluster_stop_node() { kill -KILL "$(cat "$slurm_cluster_folder/node.$1")"; }

# Repeats a command until it succeeds; fails after 60 s, or when a daemon has died, with the logs.
slurm_cluster_wait_for() {
  local what=$1 deadline=$((SECONDS + 60)) pid
  shift
  until "$@" >/dev/null 2>&1; do
    while read -r pid; do
      if ! kill -0 "$pid" 2>/dev/null; then deadline=0; fi
    done <"$slurm_cluster_folder/pids"
    if ((SECONDS >= deadline)); then
      echo "slurm_cluster: $what is not ready; its logs:" >&2
      tail -n 20 "$slurm_cluster_folder"/*.log >&2
      return 1
    fi
    sleep 0.1
  done
}

slurm_cluster_is_idle() {
  [[ $(sinfo --noheader --Node --partition=main --format=%T | sort | uniq -c | tr -s ' ') == " 2 idle" ]]
}

slurm_cluster_up() {
  PATH=$PATH:/usr/sbin
  local program
  for program in munged mungekey slurmctld slurmd srun python3; do
    if ! command -v "$program" >/dev/null; then
      echo "slurm_cluster: no $program here; install Debian's slurm-wlm, munge and python3" >&2
      return 1
    fi
  done
  slurm_cluster_folder=$(mktemp -d "${TMPDIR:-/tmp}/slurm_cluster.XXXXXX") || return 1
  local folder=$slurm_cluster_folder
  chmod 711 "$folder"
  mkdir "$folder/state" "$folder/spool.127.0.0.1" "$folder/spool.127.0.0.2"
  : >"$folder/pids"
  export SLURM_CONF=$folder/slurm.conf
  slurm_cluster_write_config "$folder"

  mungekey --create --keyfile="$folder/munge.key"
  slurm_cluster_start munged --foreground --force --key-file="$folder/munge.key" \
    --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
    --log-file="$folder/munged.log" --seed-file="$folder/munged.seed"
  slurm_cluster_wait_for munged munge --no-input --socket="$folder/munge.socket" || return 1
  slurm_cluster_start slurmctld -D -c
  slurm_cluster_start_node 127.0.0.1
  slurm_cluster_start_node 127.0.0.2
  slurm_cluster_wait_for "the cluster" slurm_cluster_is_idle
}

slurm_cluster_down() {
  [[ -n $slurm_cluster_folder ]] || return 0
  local folder=$slurm_cluster_folder pids=() pid
  slurm_cluster_folder=
  # Before the daemons end: cancels jobs that an interrupted command left.
  local deadline=$((SECONDS + 10))
  scancel --quiet --user="$(id -un)" 2>/dev/null
  while [[ -n $(squeue --noheader 2>/dev/null) ]] && ((SECONDS < deadline)); do sleep 0.1; done
  mapfile -t pids < <(tac "$folder/pids")
  for pid in "${pids[@]}"; do kill -TERM "$pid" 2>/dev/null; done
  # SIGKILL after ten seconds.
  deadline=$((SECONDS + 10))
  for pid in "${pids[@]}"; do
    while kill -0 "$pid" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.1; done
    kill -KILL "$pid" 2>/dev/null
    wait "$pid" 2>/dev/null
  done
  rm -rf "$folder"
  unset SLURM_CONF
}

slurm_cluster_main() {
  if [[ ${1:-} != run || $# -lt 2 ]]; then
    echo "usage: $0 run COMMAND [ARGUMENT…]" >&2
    return 2
  fi
  shift
  trap slurm_cluster_down EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  slurm_cluster_up || return 1
  "$@"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then slurm_cluster_main "$@"; fi
