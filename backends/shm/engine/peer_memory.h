// Reads and writes the private memory of other processes (process_vm_readv), where the kernel
// permits it. A transfer takes one copy; through the segment it takes two.
//
//   PeerMemory memory;
//   bool ok = memory.Attach(/*rank=*/1, identity_of_rank_1);
//   absl::Status status = memory.Read(1, address, {data, bytes});
//
// Linux requires the same permission as for a debugger: the same user, kernel.yama.ptrace_scope=0,
// no seccomp filter against it, and no user namespace between the two processes.
#pragma once

#include <array>
#include <cstdint>

#include "absl/status/status.h"
#include "backends/shm/engine/layout.h"
#include "backends/shm/engine/request.h"

namespace ddp::backends::shm {

// Thread-compatible. Must stay at its address while peers may attach: they read its `proof_`.
class PeerMemory {
 public:
  // Sent to the peers, so that they can attach. In another namespace the process id may refer to
  // another process, so peers compare a random number in this process's memory.
  struct Identity {
    int64_t pid;
    uint64_t proof_address;
    uint64_t proof;
  };

  PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  Identity Self() const;

  // Whether the kernel lets peers read this process's memory at `mine`. It does not where the
  // memory of a device is mapped, such as memory that CUDA pins. A positive result is cached.
  bool IsReadableByPeers(Buffer mine);

  // Prepares Read and Write for `rank`. False if its memory cannot be read (permission to write is
  // the same), or if the process is not the one that `identity` describes.
  bool Attach(int rank, const Identity& identity);

  // `rank` must be attached; `address` is in its address space. Unavailable if its process has
  // ended.
  absl::Status Read(int rank, uint64_t address, Buffer to) const;
  absl::Status Write(int rank, uint64_t address, Buffer from) const;

 private:
  template <typename Call>
  absl::Status Transfer(Call call, int rank, uint64_t address, Buffer local) const;

  const uint64_t proof_;
  std::array<int64_t, kMaxRanks> pids_ = {};
  std::array<Buffer, 64> readable_ = {};  // cache of IsReadableByPeers, by page
};

}  // namespace ddp::backends::shm
