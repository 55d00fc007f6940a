// The process group of a job: joins the ranks and binds one backend per kind of device.
//
//   DDP_ASSIGN_OR_RETURN(auto group, CreateProcessGroup(rank, {.backend = "cpu:gloo"}));
//   group.process_group->allreduce(tensors)->wait();
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "backends/backend.h"
#include "launchers/rank.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::backends {

// Both pointers are null for a world of one, which needs neither. The store's own waits have the
// timeout of a collective.
struct Group {
  c10::intrusive_ptr<c10d::ProcessGroup> process_group;
  c10::intrusive_ptr<c10d::Store> store;
  // What "auto" has chosen for CPU tensors, and why: "shm (auto: 4 ranks on one host)". Empty where
  // the backend was named.
  std::string choice = "";
};

// The type under which a ProcessGroup is to keep a backend of this name: c10d's own (nccl, mpi) or
// CUSTOM. Gloo's is not GLOO, since c10d's Logger, which DDP makes, takes any backend of that type
// for a ProcessGroupGloo, and ours are wrapped.
c10d::ProcessGroup::BackendType TypeOf(const std::string& name);

// Not collective: what can be told before there are ranks. `device_type` is what the program
// computes on: "cpu" or "cuda". OptionError for options that make no sense, NotFound for an unknown
// backend, FailedPrecondition for one that this machine or build cannot serve.
absl::Status Validate(const GroupOptions& options, const std::string& device_type = "cpu");

// Collective. Errors as Validate, Join and the backends give them.
absl::StatusOr<Group> CreateProcessGroup(const launchers::Rank& rank, const GroupOptions& options,
                                         const std::string& device_type = "cpu");

}  // namespace ddp::backends
