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
#include "base/implementation_options.h"
#include "base/options.h"
#include "base/registry.h"
#include "launchers/rank.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::backends {

struct BackendOptions;

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
  // &AnyOptions::Of<…> for options of this backend alone, "group.NAME.…"; null: it has none.
  AnyOptions (*options)() = nullptr;
  // What callers may rely on; see base/backend_capabilities.h.
  BackendCapabilities capabilities = {};
};

struct BackendTag {
  static constexpr absl::string_view kWhat = "backend";
};
using BackendRegistry = Registry<BackendEntry, BackendTag>;

// Of a process group, whatever its backends.
struct GroupOptions {
  std::string backend = "auto";  // see spec.h and auto.h
  // Maximum duration of one collective: then it fails with DeadlineExceeded.
  absl::Duration timeout = absl::Minutes(5);
  // Maximum wait for the other ranks while the group is made, by the rendezvous and by each
  // backend.
  absl::Duration join_timeout = absl::Seconds(60);
  // Network interface ("eth0") or host name/address to talk over; empty means the backend's own
  // environment variable, or its default. At most one of them.
  std::string interface = "";
  std::string hostname = "";
  // A collective that has not ended after this time is reported on stderr; zero: none is.
  absl::Duration stall = absl::Seconds(30);
  ImplementationOptions implementations = ImplementationOptions::From<BackendRegistry>();
  // Backends are watched (watch/watch.h): ranks that call different collectives, stall or die are
  // named. From the program, not from its user.
  bool watch = true;
};

constexpr auto OptionsOf(const GroupOptions&) {
  constexpr double kMostSeconds = 1e7;
  return Options(
      Option("backend", &GroupOptions::backend,
             "auto, a backend's name (gloo, nccl, …), or by device: cpu:shm,cuda:nccl; "
             "docs/backends.md"),
      Option("timeout_s", &GroupOptions::timeout, "maximum duration of one collective, in seconds")
          .Above(0)
          .AtMost(kMostSeconds),
      Option("join_timeout_s", &GroupOptions::join_timeout,
             "maximum wait for the other ranks at the start, in seconds")
          .Above(0)
          .AtMost(kMostSeconds),
      Option("interface", &GroupOptions::interface,
             "network interface of gloo, hier and mpi; empty: GLOO_SOCKET_IFNAME or default"),
      Option(
          "hostname", &GroupOptions::hostname,
          "host name or address of this machine for gloo, hier and mpi, instead of an interface"),
      Option("stall_s", &GroupOptions::stall,
             "time after which a collective is reported as stalled, with the ranks that have not "
             "called it, in seconds; 0: never")
          .AtLeast(0)
          .AtMost(kMostSeconds),
      Inline(&GroupOptions::implementations));
}

// What one backend is made of.
struct BackendOptions {
  // Rendezvous of this one backend: keys are its own (the caller prefixes them). All ranks of
  // `rank.world_size` take part.
  c10::intrusive_ptr<c10d::Store> store;
  launchers::Rank rank;
  GroupOptions group = {};
};

}  // namespace ddp::backends
