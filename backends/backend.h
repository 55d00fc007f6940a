// The interface of process-group backends: a registry that maps names to functions that create a
// c10d::Backend.
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
struct GroupOptions;

// Collective: every rank of the group calls it. Blocks until all ranks have joined, at most
// options.group.join_timeout. The caller owns the result.
using CreateBackend =
    absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> (*)(const BackendOptions& options);

struct BackendEntry {
  // Device types of the tensors that it serves: "cpu", "cuda".
  std::vector<std::string> device_types;
  CreateBackend create = nullptr;
  // FailedPrecondition, with what to do, if the backend cannot run on this machine or in this
  // build; null: it always can. Not collective; cheap; called before ranks are started.
  absl::Status (*available)() = nullptr;
  // Determines where the store is, for a backend whose ranks find each other without the launcher.
  // Collective. Returns options.rank with master_addr, master_port and, on rank 0,
  // master_listen_fd; options.store is null in this call. Null: the launcher determines it.
  absl::StatusOr<launchers::Rank> (*find_master)(const BackendOptions& options) = nullptr;
  // &AnyOptions::Of<…> for the backend's own options, "group.NAME.…"; null: it has none.
  AnyOptions (*options)() = nullptr;
  // OptionError, with a path relative to GroupOptions, if options of the group contradict each
  // other for this backend (ranges are checked without it); null: they cannot. Not collective;
  // cheap; called before ranks are started.
  absl::Status (*validate)(const GroupOptions& options) = nullptr;
  // See base/backend_capabilities.h.
  BackendCapabilities capabilities = {};
};

struct BackendTag {
  static constexpr absl::string_view kWhat = "backend";
};
using BackendRegistry = Registry<BackendEntry, BackendTag>;

// Options of a process group that are independent of its backends.
struct GroupOptions {
  std::string backend = "auto";  // see spec.h and auto.h
  // Maximum duration of one collective; then it fails with DeadlineExceeded.
  absl::Duration timeout = absl::Minutes(5);
  // Maximum wait for the other ranks while the group is created; applies to the rendezvous and to
  // each backend.
  absl::Duration join_timeout = absl::Seconds(60);
  // Network interface ("eth0"), or host name or address of this machine, for communication. At most
  // one of them; both empty: the backend's own environment variable, or its default.
  std::string interface = "";
  std::string hostname = "";
  // A collective that has not completed after this time is reported on stderr; zero: never.
  absl::Duration stall = absl::Seconds(30);
  ImplementationOptions implementations = ImplementationOptions::From<BackendRegistry>();
  // Whether backends are wrapped by the watchdog (watch/watch.h), which names ranks that call
  // different collectives, stall or die. Set by programs; not a command-line option.
  bool watch = true;
};

constexpr auto OptionsOf(const GroupOptions&) {
  constexpr double kMostSeconds = 1e7;
  return Options(
      Option("backend", &GroupOptions::backend,
             "communication backend: auto, a name (gloo, nccl, …), or one per device: "
             "cpu:shm,cuda:nccl; "
             "docs/backends.md"),
      Option("timeout_s", &GroupOptions::timeout, "maximum duration of one collective, in seconds")
          .Above(0)
          .AtMost(kMostSeconds)
          .Incidental(),
      Option("join_timeout_s", &GroupOptions::join_timeout,
             "maximum wait for the other ranks at the start, in seconds")
          .Above(0)
          .AtMost(kMostSeconds)
          .Incidental(),
      Option("interface", &GroupOptions::interface,
             "network interface of gloo, hier and mpi; empty: GLOO_SOCKET_IFNAME or default")
          .Incidental()
          .MayDiffer(),
      Option("hostname", &GroupOptions::hostname,
             "host name or address of this machine for gloo, hier and mpi, instead of an interface")
          .Incidental()
          .MayDiffer(),
      Option("stall_s", &GroupOptions::stall,
             "time after which a collective is reported as stalled, with the ranks that have not "
             "called it, in seconds; 0: never")
          .AtLeast(0)
          .AtMost(kMostSeconds)
          .Incidental(),
      Inline(&GroupOptions::implementations));
}

// The arguments of CreateBackend.
struct BackendOptions {
  // Shared by all ranks of the group. Used by this backend only: the caller passes a PrefixStore.
  c10::intrusive_ptr<c10d::Store> store;
  launchers::Rank rank;
  GroupOptions group = {};
};

}  // namespace ddp::backends
