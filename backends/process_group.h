// Creates the process group of a job: joins the ranks and binds one backend per device type.
//
//   DDP_ASSIGN_OR_RETURN(auto group, CreateProcessGroup(rank, {.backend = "cpu:gloo"}));
//   group.process_group->allreduce(tensors)->wait();
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "backends/backend.h"
#include "backends/watch/training_thread.h"
#include "launchers/rank.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::backends {

// Both pointers are null if there is one rank only. The timeout of the store is
// GroupOptions::timeout.
struct Group {
  c10::intrusive_ptr<c10d::ProcessGroup> process_group;
  c10::intrusive_ptr<c10d::Store> store;
  // The choice of "auto" for CPU tensors, and why: "shm (auto: 4 ranks on one host)". Empty if the
  // backend was named.
  std::string choice = "";
  // The rank that was given, with the local world size and the node that the ranks have found where
  // its variables do not tell (Rank::local_world_size_is_known).
  launchers::Rank place = {};
  // It belongs to the thread that has created the group. Null: the group is not watched.
  std::shared_ptr<watch::TrainingThread> training_thread = nullptr;
};

// The type under which a ProcessGroup keeps a backend of this name: c10d's own type (gloo, nccl,
// mpi) or CUSTOM. Before LibTorch 2.15 gloo's is CUSTOM, too (kLoggerTakesAnyGlooBackend).
c10d::ProcessGroup::BackendType TypeOf(const std::string& name);

// What the caller has the ranks tell each other when they join, before any backend exists.
struct JoinCheck {
  std::string note = "";  // of this rank, without newlines
  // Called with the store and every rank's note, by rank; its error is CreateProcessGroup's. It may
  // use the store, under a prefix of its own, where all ranks do. Null: nothing is checked.
  std::function<absl::Status(const c10::intrusive_ptr<c10d::Store>& store,
                             const std::vector<std::string>& notes)>
      check = nullptr;
};

// Not collective: checks what can be checked before ranks are started. `device_type` is the device
// that the program computes on: "cpu" or "cuda". OptionError for wrong options; its code is
// NotFound for an unknown backend. FailedPrecondition for one that cannot run on this machine or in
// this build.
absl::Status Validate(const GroupOptions& options, const std::string& device_type = "cpu");

// Collective. Returns the errors of Validate, of Join (rendezvous.h), and of the backends, with the
// name of the backend and the rank.
absl::StatusOr<Group> CreateProcessGroup(const launchers::Rank& rank, const GroupOptions& options,
                                         const std::string& device_type = "cpu",
                                         const JoinCheck& join_check = {});

}  // namespace ddp::backends
