#!/bin/bash
# Launcher mpi on two hosts of two ranks: ranks find rank 0 without its address, with backend mpi
# through MPI and with others by mpirun's, and training gives exactly the result of four ranks on one
# host.
#
# Run as root, from anywhere. $BIN: where bazel has put the programs; without it, they are built.
source "$(dirname "${BASH_SOURCE[0]}")/hosts.sh"

command -v mpirun >/dev/null || skip "no mpirun here; install Debian's openmpi-bin"
train=("$BIN/tools/train" --launcher=mpi --backend=mpi --model=mlp --dataset=synthetic
  --batch_size=32 --max_steps=40 --seed=7)
options=(--allow-run-as-root -x OMP_NUM_THREADS=1)
unset MASTER_ADDR MASTER_PORT

# The last line of a run without its time.
result_of() {
  sed -nE 's/^(.*] ?)?(test accuracy [0-9.]+ loss [0-9.]+ epochs [0-9]+) wall .*/\2/p' "$1"
}

if ! mpirun "${options[@]}" --bind-to none --oversubscribe -n 4 "${train[@]}" --log_dir="$scratch/log_one" \
  >"$scratch/one" 2>&1; then
  grep -q "built without an MPI" "$scratch/one" && skip "Bazel found no MPI"
  fail "one host: $(tail -n 5 "$scratch/one")"
fi

# Replaces ssh: enters the other namespace, with its own host name.
cat >"$scratch/agent" <<END
#!/bin/bash
shift
exec ip netns exec ${hosts[1]} unshare --uts bash -c "hostname ${hosts[1]}; \$*"
END
chmod +x "$scratch/agent"
hosts_up 1 0.1
# on_two [OPTION OF MPIRUN…] -- ARGUMENT…: trains on both, started from the first host.
on_two() {
  local of_mpirun=()
  while [[ $1 != -- ]]; do of_mpirun+=("$1"); shift; done
  shift
  ip netns exec "${hosts[0]}" unshare --uts bash -c 'hostname "$1"; shift; exec "$@"' bash \
    "${hosts[0]}" mpirun "${options[@]}" --mca plm_rsh_agent "$scratch/agent" --mca btl self,vader,tcp \
    --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 --host 10.77.0.1:2,10.77.0.2:2 -n 4 "${of_mpirun[@]}" \
    "${train[@]}" "$@"
}
on_two --bind-to none -- --log_dir="$scratch/log_two" >"$scratch/two" 2>&1 ||
  fail "two hosts: $(tail -n 5 "$scratch/two")"

one=$(result_of "$scratch/one")
two=$(result_of "$scratch/two")
[[ -n $one && $one == "$two" ]] || fail "'$two' on two hosts, '$one' on one"

on_two --bind-to none -- --backend=gloo --interface=eth0 --log_dir="$scratch/log_gloo" >"$scratch/gloo" 2>&1 ||
  fail "backend gloo on two hosts: $(tail -n 5 "$scratch/gloo")"
[[ -n $(result_of "$scratch/gloo") ]] || fail "backend gloo has no result: $(tail -n 5 "$scratch/gloo")"
# Rank 0 where mpirun is not.
printf 'rank %d=%s slot=%d\n' 0 10.77.0.2 0 1 10.77.0.2 1 2 10.77.0.1 0 3 10.77.0.1 1 >"$scratch/ranks"
code=0
on_two --rankfile "$scratch/ranks" -- --backend=gloo --interface=eth0 --log_dir="$scratch/log_other" >"$scratch/other" 2>&1 ||
  code=$?
[[ $code == 2 ]] || fail "exit code $code where nobody knew rank 0: $(tail -n 5 "$scratch/other")"
grep -q "does not say where rank 0 is" "$scratch/other" || fail "no advice: $(tail -n 5 "$scratch/other")"
say "passed: $two"
