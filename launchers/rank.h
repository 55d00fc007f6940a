// Rank and world size of this process: the interface between launchers and the code that runs in a
// rank.
//
//   Rank rank = …;                       // from a launcher's Detect
//   if (rank.rank == 0) printf("%d ranks\n", rank.world_size);
#pragma once

#include <optional>
#include <string>

namespace ddp::launchers {

// One process of a job. The fields correspond to torchrun's variables. A plain value.
struct Rank {
  int rank = 0;              // RANK: 0 … world_size-1, unique in the job
  int world_size = 1;        // WORLD_SIZE: processes in the job
  int local_rank = 0;        // LOCAL_RANK: 0 … local_world_size-1, unique on this node
  int local_world_size = 1;  // LOCAL_WORLD_SIZE: processes of the job on this node
  // False: it is not set, and local_world_size is the least that it can be, until the ranks have
  // met.
  bool local_world_size_is_known = true;
  // GROUP_RANK: index of this node in the job. mpirun does not provide it: computed there as if
  // ranks were placed node by node.
  int node_rank = 0;

  // MASTER_ADDR and MASTER_PORT: where rank 0 serves the rendezvous store. A host name or address;
  // empty if the launcher does not know it (mpirun over several nodes). Port 0 only if world_size
  // is 1.
  std::string master_addr = "127.0.0.1";
  int master_port = 0;

  // TORCHELASTIC_USE_AGENT_STORE: torchrun's agent serves the store at master_addr:master_port, and
  // rank 0 connects as a client like all others. Such a store outlives restarts of the ranks:
  // prefix keys by restart_count.
  bool master_is_external = false;

  int restart_count = 0;        // TORCHELASTIC_RESTART_COUNT
  std::string run_id = "none";  // TORCHELASTIC_RUN_ID: the same on all ranks of one job
  // Names the job in all its lives (restart_count), in which a launcher may choose another run_id:
  // tells whose a folder is. Set by Choose (JobOf, detect.h); empty: as run_id.
  std::string job = {};
  // Whether other runs may have the same job at the same time, as in one allocation of SLURM: that
  // a process has it does not make the process another life of this one then. Set by Choose.
  bool job_is_shared = false;

  // Rank 0 serves on this listening socket if the launcher has bound master_port already, so that
  // no other process can take the port in between. Owned by the code that serves the store;
  // close-on-exec.
  std::optional<int> master_listen_fd;
};

}  // namespace ddp::launchers
