#include "backends/hier/hier.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "backends/common/host.h"
#include "backends/common/join.h"
#include "backends/common/topology.h"
#include "backends/hier/hier_backend.h"
#include "base/host_name.h"
#include "base/option_error.h"
#include "base/option_text.h"
#include "base/status.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

namespace ddp::backends::hier {
namespace {

constexpr char kName[] = "hier";

struct Hosts {
  Topology topology;
  std::vector<std::string> names;  // by host
};

absl::StatusOr<Hosts> FindHosts(const BackendOptions& options, const HierOptions& hier) {
  // Separated by a line break, which neither text contains.
  const std::string own =
      absl::StrCat(hier.host_id.empty() ? HostId() : hier.host_id, "\n", HostName());
  absl::StatusOr<std::vector<std::string>> gathered = GatherFromAllRanks(
      *options.store, options.rank.rank, options.rank.world_size, own, options.group.join_timeout);
  if (!gathered.ok()) return Annotate(gathered.status(), "finding out which ranks share a host");
  std::vector<std::string> texts = *std::move(gathered);
  Hosts hosts;
  std::vector<std::string> names;
  for (std::string& text : texts) {
    const std::pair<std::string, std::string> id_and_name =
        absl::StrSplit(text, absl::MaxSplits('\n', 1));
    text = id_and_name.first;
    names.push_back(id_and_name.second);
  }
  hosts.topology = MakeTopology(texts, options.rank.rank);
  for (const std::vector<int>& ranks : hosts.topology.hosts) {
    hosts.names.push_back(names[ranks[0]]);
  }
  return hosts;
}

// Creates a part of `ranks`, in which this rank has number `rank`; `on_host` of them are on its
// host.
absl::StatusOr<Part> MakePart(const BackendOptions& options, const std::string& backend,
                              const std::string& name, const std::string& store_prefix, int rank,
                              std::vector<int> ranks, int local_rank, int on_host, int host) {
  DDP_ASSIGN_OR_RETURN(BackendEntry entry, BackendRegistry::Find(backend));
  BackendOptions part_options = options;
  part_options.store = c10::make_intrusive<c10d::PrefixStore>(store_prefix, options.store);
  part_options.rank.rank = rank;
  part_options.rank.world_size = static_cast<int>(ranks.size());
  part_options.rank.local_rank = local_rank;
  part_options.rank.local_world_size = on_host;
  part_options.rank.node_rank = host;
  absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> made = entry.create(part_options);
  if (!made.ok()) return Annotate(made.status(), absl::StrCat(name, " part (", backend, ")"));
  return Part{name, std::move(ranks), *std::move(made)};
}

// Whether the backend between hosts can carry packed numbers, whose size the receiver cannot know.
absl::StatusOr<bool> CanPack(const HierOptions& hier) {
  DDP_ASSIGN_OR_RETURN(const BackendEntry cross, BackendRegistry::Find(hier.cross));
  return cross.capabilities.shorter_messages_fit;
}

// The path of an error is relative to HierOptions.
absl::Status CheckAlone(const HierOptions& hier) {
  DDP_RETURN_IF_ERROR(ValidateOptions(hier));
  for (const auto& [path, part] :
       {std::pair("local", hier.local), std::pair("cross", hier.cross)}) {
    if (part == kName) {
      return OptionError(path, part, "cannot be a part of itself; use shm or gloo");
    }
  }
  DDP_ASSIGN_OR_RETURN(const bool can_pack, CanPack(hier));
  if (hier.packing == Packing::kAlways && !can_pack) {
    return OptionError("packing", FormatOption(hier.packing),
                       absl::StrCat("cannot be combined with cross=", hier.cross,
                                    ", whose receives take no shorter messages; use packing=auto, "
                                    "or cross=gloo"));
  }
  return absl::OkStatus();
}

// The path of an error is relative to GroupOptions.
absl::Status Check(const HierOptions& hier) { return InGroup(kName, CheckAlone(hier)); }

absl::Status Validate(const GroupOptions& group) {
  return Check(group.implementations.Get<HierOptions>(kName));
}

absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> Create(const BackendOptions& options) {
  return CreateHier(options, options.group.implementations.Get<HierOptions>(kName));
}

// Whether both default parts are available.
absl::Status Available() {
  const HierOptions hier;
  for (const std::string& part : {hier.local, hier.cross}) {
    DDP_ASSIGN_OR_RETURN(const BackendEntry entry, BackendRegistry::Find(part));
    if (entry.available != nullptr) DDP_RETURN_IF_ERROR(entry.available());
  }
  return absl::OkStatus();
}

const Registration<BackendRegistry> kHier(kName,
                                          BackendEntry{.device_types = {"cpu"},
                                                       .create = &Create,
                                                       .available = &Available,
                                                       .options = &AnyOptions::Of<HierOptions>,
                                                       .validate = &Validate});

}  // namespace

absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> CreateHier(const BackendOptions& options,
                                                             const HierOptions& hier) {
  DDP_RETURN_IF_ERROR(Check(hier));
  DDP_ASSIGN_OR_RETURN(const bool can_pack, CanPack(hier));
  if (options.store == nullptr) return absl::InvalidArgumentError("no store");
  DDP_ASSIGN_OR_RETURN(Hosts hosts, FindHosts(options, hier));
  const Topology& topology = hosts.topology;
  std::vector<int> all;
  for (int rank = 0; rank < options.rank.world_size; ++rank) all.push_back(rank);

  Parts parts;
  if (topology.local_size() > 1 || topology.num_hosts() == 1) {
    DDP_ASSIGN_OR_RETURN(
        parts.local, MakePart(options, hier.local, "local", absl::StrCat("local/", topology.host),
                              topology.local_rank, topology.hosts[topology.host],
                              topology.local_rank, topology.local_size(), topology.host));
    if (topology.num_hosts() == 1) return parts.local.backend;
  }
  DDP_ASSIGN_OR_RETURN(parts.flat,
                       MakePart(options, hier.cross, "all-ranks", "flat", options.rank.rank, all,
                                topology.local_rank, topology.local_size(), topology.host));
  if (topology.num_hosts() == options.rank.world_size) return parts.flat.backend;
  if (topology.local_rank < topology.lanes()) {
    DDP_ASSIGN_OR_RETURN(
        parts.cross,
        MakePart(options, hier.cross, "cross-host", absl::StrCat("cross/", topology.local_rank),
                 topology.host, topology.RanksOfLane(topology.local_rank), /*local_rank=*/0,
                 /*on_host=*/1, topology.host));
  }

  HierBackend::Config config;
  config.topology = topology;
  config.parts = std::move(parts);
  config.host_names = std::move(hosts.names);
  config.timeout = absl::ToChronoMilliseconds(options.group.timeout);
  config.options = hier;
  if (!can_pack) config.options.packing = Packing::kNever;
  config.create = [options, hier](const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                  int world_size, std::chrono::milliseconds timeout) {
    BackendOptions of_subset = options;
    of_subset.store = store;
    of_subset.rank.rank = rank;
    of_subset.rank.world_size = world_size;
    of_subset.group.timeout = absl::FromChrono(timeout);
    return CreateHier(of_subset, hier);
  };
  return CatchStatus(kName, [&]() -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<HierBackend>(std::move(config));
  });
}

}  // namespace ddp::backends::hier
