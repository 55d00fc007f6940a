#include "backends/shm/engine/peer_memory.h"

#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>

#include "absl/strings/str_cat.h"
#include "backends/common/has_died.h"

namespace ddp::backends::shm {
namespace {

uint64_t RandomNumber() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

}  // namespace

PeerMemory::PeerMemory() : proof_(RandomNumber()) {}

PeerMemory::Identity PeerMemory::Self() const {
  return {getpid(), reinterpret_cast<uint64_t>(&proof_), proof_};
}

bool PeerMemory::IsReadableByPeers(Buffer mine) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(mine.data);
  Buffer& known = readable_[address / 4096 % readable_.size()];
  if (known.data == mine.data && known.bytes == mine.bytes) return true;
  if (mine.bytes == 0) return true;
  std::byte ends[2];
  const iovec here = {ends, sizeof(ends)};
  const iovec there[] = {{mine.data, 1}, {mine.data + mine.bytes - 1, 1}};
  if (process_vm_readv(getpid(), &here, 1, there, 2, 0) != sizeof(ends)) return false;
  known = mine;
  return true;
}

bool PeerMemory::Attach(int rank, const Identity& identity) {
  pids_[rank] = identity.pid;
  uint64_t proof = 0;
  const absl::Status read =
      Read(rank, identity.proof_address, {reinterpret_cast<std::byte*>(&proof), sizeof(proof)});
  return read.ok() && proof == identity.proof;
}

template <typename Call>
absl::Status PeerMemory::Transfer(Call call, int rank, uint64_t address, Buffer local) const {
  while (local.bytes != 0) {
    const iovec here = {local.data, local.bytes};
    const iovec there = {reinterpret_cast<void*>(address), local.bytes};
    const ssize_t moved = call(static_cast<pid_t>(pids_[rank]), &here, 1, &there, 1, 0);
    if (moved < 0 && errno == ESRCH) {
      return absl::UnavailableError(absl::StrCat("Connection closed by peer: rank ", rank, " (pid ",
                                                 pids_[rank], ")", kHasDied));
    }
    if (moved <= 0) {
      return absl::InternalError(absl::StrCat(
          "the memory of rank ", rank, " (pid ", pids_[rank],
          ") cannot be reached any more: ", moved < 0 ? std::strerror(errno) : "no bytes moved"));
    }
    local.data += moved;
    local.bytes -= moved;
    address += moved;
  }
  return absl::OkStatus();
}

absl::Status PeerMemory::Read(int rank, uint64_t address, Buffer to) const {
  return Transfer(&process_vm_readv, rank, address, to);
}

absl::Status PeerMemory::Write(int rank, uint64_t address, Buffer from) const {
  return Transfer(&process_vm_writev, rank, address, from);
}

}  // namespace ddp::backends::shm
