// Other processes' private memory, where the kernel lets us at it: one copy where the segment takes
// two.
//
//   PeerMemory memory;
//   memory.Learn(/*rank=*/1, place_of_1);            // false: it cannot be read, or is not it
//   absl::Status status = memory.Read(1, address, {data, bytes});
//
// Linux asks of process_vm_readv what it asks of a debugger: the same user, and no Yama
// (kernel.yama.ptrace_scope of 1 or more), seccomp filter or user namespace in between.
#pragma once

#include <array>
#include <cstdint>

#include "absl/status/status.h"
#include "backends/shm/engine/layout.h"
#include "backends/shm/engine/request.h"

namespace ddp::backends::shm {

// Thread-compatible; must not move while peers may read its proof.
class PeerMemory {
 public:
  // What a rank tells the others of itself. Process ids can mean other processes in the other's
  // namespace, so a random number in the memory itself proves that it is the right one.
  struct Place {
    int64_t pid;
    uint64_t proof_address;
    uint64_t proof;
  };

  PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  Place Mine() const;

  // Whether the kernel lets others at this memory of one's own: not where a device's is mapped,
  // such as what CUDA pins. Remembers what it has found.
  bool Exposes(Buffer mine);

  // Whether that rank's memory can be read and, which the kernel grants alike, written.
  bool Learn(int rank, const Place& place);

  // Of a rank that has been learnt. Unavailable if it has died.
  absl::Status Read(int rank, uint64_t address, Buffer to) const;
  absl::Status Write(int rank, uint64_t address, Buffer from) const;

 private:
  template <typename Call>
  absl::Status Transfer(Call call, int rank, uint64_t address, Buffer local) const;

  const uint64_t proof_;
  std::array<int64_t, kMaxRanks> pids_ = {};
  std::array<Buffer, 64> exposed_ = {};  // by address
};

}  // namespace ddp::backends::shm
