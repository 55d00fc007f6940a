// Who am I: the one contract between launchers and everything that runs inside a rank.
//
//   Rank rank = …;                       // from a launcher's Detect
//   if (rank.rank == 0) Log("we are", rank.world_size);
#pragma once

#include <optional>
#include <string>

namespace ddp::launchers {

// One process of a job. Field by field what torchrun's variables say; a plain value.
struct Rank {
  int rank = 0;              // RANK: 0 … world_size-1, unique in the job
  int world_size = 1;        // WORLD_SIZE: processes in the job
  int local_rank = 0;        // LOCAL_RANK: 0 … local_world_size-1, unique on this node
  int local_world_size = 1;  // LOCAL_WORLD_SIZE: processes of the job on this node
  // GROUP_RANK: index of this node in the job. mpirun does not tell; under it, counted as if ranks
  // had been placed node by node.
  int node_rank = 0;

  // MASTER_ADDR and MASTER_PORT: where rank 0 serves the rendezvous store. Host name or address,
  // empty where the launcher cannot tell (mpirun over several nodes); port 0 only where world_size
  // is 1.
  std::string master_addr = "127.0.0.1";
  int master_port = 0;

  // TORCHELASTIC_USE_AGENT_STORE: the store at master_addr:master_port is served by somebody else
  // (torchrun's agent), and rank 0 must connect as a client like all others. Such a store outlives
  // a restart: prefix keys by restart_count.
  bool master_is_external = false;

  int restart_count = 0;        // TORCHELASTIC_RESTART_COUNT
  std::string run_id = "none";  // TORCHELASTIC_RUN_ID: the same on all ranks of one job

  // In rank 0, if the launcher has bound master_port already: the listening socket to serve on, so
  // that nobody can take the port in between. The reader owns it; it is close-on-exec.
  std::optional<int> master_listen_fd;
};

}  // namespace ddp::launchers
