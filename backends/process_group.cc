#include "backends/process_group.h"

#include <map>

#include "absl/strings/str_cat.h"
#include "backends/auto.h"
#include "backends/backend.h"
#include "backends/rendezvous.h"
#include "backends/spec.h"
#include "backends/watch/watch.h"
#include "base/status.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

namespace ddp::backends {
namespace {

using BackendType = c10d::ProcessGroup::BackendType;

// ProcessGroup::setBackend keeps one backend for each type it knows, and takes that one again for a
// second device whatever it is given; all names that it does not know are of one type.
absl::Status CheckDistinct(absl::string_view text, const BackendSpec& spec) {
  std::map<BackendType, std::string> names;
  for (const auto& [device, name] : spec) {
    const auto [other, fresh] = names.emplace(TypeOf(name), name);
    if (!fresh && other->second != name) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--backend='", text, "': a c10d group cannot tell backends ", other->second, " and ",
          name, " apart, and would use one for both devices; take nccl or mpi for one"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckOptions(const GroupOptions& options, const BackendSpec& spec) {
  if (options.timeout <= absl::ZeroDuration() || options.timeout == absl::InfiniteDuration() ||
      options.join_timeout <= absl::ZeroDuration() ||
      options.join_timeout == absl::InfiniteDuration()) {
    return absl::InvalidArgumentError("timeouts must be positive and finite");
  }
  if (options.stall < absl::ZeroDuration() || options.stall == absl::InfiniteDuration()) {
    return absl::InvalidArgumentError(
        "the time to a stall's report must be finite, or zero for none");
  }
  if (!options.interface.empty() && !options.hostname.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("give an interface ('", options.interface,
                                                   "') or a host name ('", options.hostname,
                                                   "'), not both"));
  }
  DDP_RETURN_IF_ERROR(CheckAvailable(options.backend));
  DDP_RETURN_IF_ERROR(CheckDistinct(options.backend, spec));
  for (const auto& [device, name] : spec) {
    if (device == options.device_type) return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--backend='", options.backend, "' serves no ", options.device_type,
                   " tensors, which --device=", options.device_type,
                   " computes on; change one of the two, or leave --backend=auto"));
}

// options.rank, with what the first backend that finds the master by itself says of it.
absl::StatusOr<launchers::Rank> FindMaster(const GroupOptions& options, const BackendSpec& spec) {
  if (options.rank.master_is_external) return options.rank;
  for (const auto& [device, name] : spec) {
    if (name == kAuto) continue;  // chosen when the ranks have met
    const absl::StatusOr<BackendEntry> entry = BackendRegistry::Find(name);
    if (!entry.ok() || entry->find_master == nullptr) continue;  // "auto" is no backend
    BackendOptions backend_options;
    backend_options.rank = options.rank;
    backend_options.timeout = options.join_timeout;
    backend_options.interface = options.interface;
    backend_options.hostname = options.hostname;
    return entry->find_master(backend_options);
  }
  return options.rank;
}

}  // namespace

c10d::ProcessGroup::BackendType TypeOf(const std::string& name) {
  const BackendType type = c10d::ProcessGroup::strToBackendType(name);
  return type == BackendType::GLOO ? BackendType::CUSTOM : type;
}

absl::Status Validate(const GroupOptions& options) {
  DDP_ASSIGN_OR_RETURN(BackendSpec spec, ParseBackendSpec(options.backend, options.device_type));
  return CheckOptions(options, spec);
}

absl::StatusOr<Group> CreateProcessGroup(const GroupOptions& options) {
  DDP_ASSIGN_OR_RETURN(BackendSpec spec, ParseBackendSpec(options.backend, options.device_type));
  DDP_RETURN_IF_ERROR(CheckOptions(options, spec));
  if (options.rank.world_size == 1) return Group{};

  DDP_ASSIGN_OR_RETURN(const launchers::Rank rank, FindMaster(options, spec));
  Group group;
  DDP_ASSIGN_OR_RETURN(group.store, Join(rank, {.timeout = options.join_timeout}));
  DDP_ASSIGN_OR_RETURN(group.choice, ResolveAuto(*group.store, rank, options.join_timeout, spec));
  std::map<std::string, c10::intrusive_ptr<c10d::Backend>> made;
  for (const auto& [device, name] : spec) {
    if (made.count(name) != 0) continue;
    DDP_ASSIGN_OR_RETURN(BackendEntry entry, BackendRegistry::Find(name));
    BackendOptions backend_options;
    backend_options.store =
        c10::make_intrusive<c10d::PrefixStore>(absl::StrCat("backend/", name), group.store);
    backend_options.rank = rank;
    backend_options.timeout = options.timeout;
    backend_options.interface = options.interface;
    backend_options.hostname = options.hostname;
    backend_options.shm = options.shm;
    backend_options.nccl = options.nccl;
    absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> backend = entry.create(backend_options);
    if (!backend.ok()) {
      return Annotate(backend.status(), absl::StrCat("backend ", name, " on rank ", rank.rank));
    }
    if (options.watch) {
      backend = CatchStatus("watching it", [&] {
        return watch::Watch(
            *backend,
            c10::make_intrusive<c10d::PrefixStore>(absl::StrCat("watch/", name), group.store),
            {.stall = options.stall,
             .rank_0_serves_store = !rank.master_is_external,
             .capabilities = entry.capabilities});
      });
      DDP_RETURN_IF_ERROR(backend.status());
    }
    made.emplace(name, *std::move(backend));
  }

  absl::Status bound = CatchStatus("binding backends", [&] {
    group.process_group =
        c10::make_intrusive<c10d::ProcessGroup>(group.store, rank.rank, rank.world_size);
    for (const auto& [device, name] : spec) {
      const BackendType type = TypeOf(name);
      group.process_group->setBackend(c10::Device(device).type(), type, made.at(name));
      if (device == options.device_type) group.process_group->setDefaultBackend(type);
    }
    group.process_group->setGroupName(absl::StrCat("ddp/", rank.run_id));
    // From here on a rank that is slow, such as rank 0 while it saves, is waited for as in a
    // collective.
    group.store->setTimeout(absl::ToChronoMilliseconds(options.timeout));
  });
  DDP_RETURN_IF_ERROR(bound);
  return group;
}

}  // namespace ddp::backends
