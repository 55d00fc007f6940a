#include "backends/process_group.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "backends/auto.h"
#include "backends/backend.h"
#include "backends/common/host.h"
#include "backends/common/topology.h"
#include "backends/rendezvous.h"
#include "backends/spec.h"
#include "backends/watch/training_thread.h"
#include "backends/watch/watch.h"
#include "base/option_error.h"
#include "base/status.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

namespace ddp::backends {
namespace {

using BackendType = c10d::ProcessGroup::BackendType;

// ProcessGroup::setBackend keeps one backend per BackendType, and uses it for a second device of
// the same type whatever backend is passed. All names that c10d does not know have one type.
absl::Status CheckDistinct(absl::string_view text, const BackendSpec& spec) {
  std::map<BackendType, std::string> names;
  for (const auto& [device, name] : spec) {
    const auto [other, fresh] = names.emplace(TypeOf(name), name);
    if (!fresh && other->second != name) {
      return OptionError("backend", text,
                         absl::StrCat("names ", other->second, " and ", name,
                                      ", which a c10d group cannot tell apart: it would use one "
                                      "for both devices; use nccl or mpi for one"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckOptions(const GroupOptions& options, const std::string& device_type,
                          const BackendSpec& spec) {
  DDP_RETURN_IF_ERROR(ValidateOptions(options));
  if (!options.interface.empty() && !options.hostname.empty()) {
    return OptionError("interface", options.interface,
                       absl::StrCat("cannot be combined with hostname=", options.hostname,
                                    ": give one of the two"));
  }
  DDP_RETURN_IF_ERROR(CheckAvailable(options.backend));
  DDP_RETURN_IF_ERROR(CheckDistinct(options.backend, spec));
  for (const auto& [device, name] : spec) {
    if (name == kAuto) continue;  // chosen after the ranks have joined
    DDP_ASSIGN_OR_RETURN(const BackendEntry entry, BackendRegistry::Find(name));
    if (entry.validate != nullptr) DDP_RETURN_IF_ERROR(entry.validate(options));
  }
  for (const auto& [device, name] : spec) {
    if (device == device_type) return absl::OkStatus();
  }
  return OptionError("backend", options.backend,
                     absl::StrCat("serves no ", device_type, " tensors, which device=", device_type,
                                  " computes on; change one of the two, or use backend=auto"));
}

// `rank`, with the store's address from the first backend that determines it by itself.
absl::StatusOr<launchers::Rank> FindMaster(const launchers::Rank& rank, const GroupOptions& options,
                                           const BackendSpec& spec) {
  if (rank.master_is_external) return rank;
  for (const auto& [device, name] : spec) {
    if (name == kAuto) continue;  // chosen after the ranks have joined
    const absl::StatusOr<BackendEntry> entry = BackendRegistry::Find(name);
    if (!entry.ok() || entry->find_master == nullptr) continue;  // unknown names are reported later
    return entry->find_master({.store = nullptr, .rank = rank, .group = options});
  }
  return rank;
}

}  // namespace

c10d::ProcessGroup::BackendType TypeOf(const std::string& name) {
  const BackendType type = c10d::ProcessGroup::strToBackendType(name);
  return type == BackendType::GLOO && !kLoggerTakesAnyGlooBackend ? BackendType::CUSTOM : type;
}

absl::Status Validate(const GroupOptions& options, const std::string& device_type) {
  DDP_ASSIGN_OR_RETURN(BackendSpec spec, ParseBackendSpec(options.backend, device_type));
  return CheckOptions(options, device_type, spec);
}

absl::StatusOr<Group> CreateProcessGroup(const launchers::Rank& launched,
                                         const GroupOptions& options,
                                         const std::string& device_type,
                                         const JoinCheck& join_check) {
  DDP_ASSIGN_OR_RETURN(BackendSpec spec, ParseBackendSpec(options.backend, device_type));
  DDP_RETURN_IF_ERROR(CheckOptions(options, device_type, spec));
  Group group;
  group.place = launched;
  if (launched.world_size == 1) return group;

  DDP_ASSIGN_OR_RETURN(launchers::Rank rank, FindMaster(launched, options, spec));
  // One exchange for the caller's note, in the first line, the host, and for the choice of auto.
  std::vector<std::string> notes;
  DDP_ASSIGN_OR_RETURN(
      group.store,
      Join(rank,
           {.timeout = options.join_timeout,
            .note = absl::StrCat(join_check.note, "\n", HostId(), "\n", ReportForAuto(spec))},
           &notes));
  std::vector<std::string> hosts, reports;
  for (std::string& note : notes) {
    std::vector<std::string> parts = absl::StrSplit(note, absl::MaxSplits('\n', 2));
    parts.resize(3);
    note = std::move(parts[0]);
    hosts.push_back(std::move(parts[1]));
    reports.push_back(std::move(parts[2]));
  }
  if (!launched.local_world_size_is_known) {
    const Topology topology = MakeTopology(hosts, launched.rank);
    for (launchers::Rank* const place : {&rank, &group.place}) {
      place->local_world_size = topology.local_size();
      place->local_world_size_is_known = true;
      place->node_rank = topology.host;
    }
  }
  if (join_check.check != nullptr) DDP_RETURN_IF_ERROR(join_check.check(group.store, notes));
  DDP_ASSIGN_OR_RETURN(group.choice, ResolveAuto(hosts, reports, spec));
  if (options.watch) group.training_thread = std::make_shared<watch::TrainingThread>();
  std::map<std::string, c10::intrusive_ptr<c10d::Backend>> made;
  for (const auto& [device, name] : spec) {
    if (made.count(name) != 0) continue;
    DDP_ASSIGN_OR_RETURN(BackendEntry entry, BackendRegistry::Find(name));
    absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> backend =
        entry.create({.store = c10::make_intrusive<c10d::PrefixStore>(
                          absl::StrCat("backend/", name), group.store),
                      .rank = rank,
                      .group = options});
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
             .capabilities = entry.capabilities,
             .training_thread = group.training_thread});
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
      if (device == device_type) group.process_group->setDefaultBackend(type);
    }
    group.process_group->setGroupName(absl::StrCat("ddp/", rank.run_id));
    group.store->setTimeout(absl::ToChronoMilliseconds(options.timeout));
  });
  DDP_RETURN_IF_ERROR(bound);
  return group;
}

}  // namespace ddp::backends
