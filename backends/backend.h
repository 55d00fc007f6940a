// The seam of process-group backends: a name is bound to a function that makes a c10d::Backend.
//
//   absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> Create(const BackendOptions& options);
//   const ddp::Registration<BackendRegistry> kMine("mine", BackendEntry{{"cpu"}, &Create});
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/backend_capabilities.h"
#include "base/registry.h"
#include "launchers/rank.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::backends {

// Of shm, and of the part of hier that runs inside a host.
struct ShmOptions {
  // Upper bound of the segment that the ranks of one host share for messages, bytes.
  int64_t segment_bytes = int64_t{256} << 20;
  // Upper bound, per rank, of tensors that live in shared memory, so that a collective on them
  // copies nothing (Backend::allocateTensor; DDP's gradient buckets). Zero turns the arena off.
  int64_t arena_bytes = int64_t{4} << 30;
};

struct NcclOptions {
  bool high_priority_stream = false;  // collectives overtake the kernels of other streams
  bool nonblocking_init = false;      // communicators are made in the background
};

struct BackendOptions {
  // Rendezvous of this one backend: keys are its own (the caller prefixes them). All ranks of
  // `rank.world_size` take part.
  c10::intrusive_ptr<c10d::Store> store;
  launchers::Rank rank;

  // Longest that one collective may take before it fails with DeadlineExceeded. Finite.
  absl::Duration timeout = absl::Minutes(5);

  // Network interface ("eth0") or host name/address to talk over; empty means the backend's own
  // environment variable, or its default. At most one of them.
  std::string interface = "";
  std::string hostname = "";

  ShmOptions shm = {};
  NcclOptions nccl = {};
};

// Collective: every rank of the group calls it. Blocks until the ranks have met.
using CreateBackend =
    absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> (*)(const BackendOptions& options);

struct BackendEntry {
  std::vector<std::string> device_types;  // what a bare name is bound to: "cpu", "cuda"
  CreateBackend create = nullptr;
  // FailedPrecondition, with what to do, where this machine or build cannot serve it; null: it
  // always can. Not collective, and cheap: asked before there are ranks.
  absl::Status (*available)() = nullptr;
  // For a backend whose ranks find each other by other means than the launcher's: where their store
  // is to be. Collective. Returns options.rank with master_addr, master_port and, in rank 0,
  // master_listen_fd; options.store is null. Null: as the launcher says.
  absl::StatusOr<launchers::Rank> (*find_master)(const BackendOptions& options) = nullptr;
  // What callers may rely on; see base/backend_capabilities.h.
  BackendCapabilities capabilities = {};
};

struct BackendTag {
  static constexpr absl::string_view kWhat = "backend";
};
using BackendRegistry = Registry<BackendEntry, BackendTag>;

}  // namespace ddp::backends
