#include "backends/conformance/groups.h"

#include <thread>

#include "absl/strings/str_cat.h"
#include "backends/conformance/start.h"
#include "base/status.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

namespace ddp::backends::conformance {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

constexpr int kInFlight = 4;

BackendOptions WithPrefix(const BackendOptions& options, const std::string& prefix) {
  BackendOptions prefixed = options;
  prefixed.store = c10::make_intrusive<c10d::PrefixStore>(prefix, options.store);
  return prefixed;
}

// The group of the ranks that are as even, or odd, as this one.
BackendOptions OfParity(const BackendOptions& options) {
  const int parity = options.rank.rank % 2;
  BackendOptions half = WithPrefix(options, absl::StrCat("subgroup/", parity));
  half.rank.rank = half.rank.local_rank = options.rank.rank / 2;
  half.rank.world_size = half.rank.local_world_size = (options.rank.world_size + 1 - parity) / 2;
  return half;
}

absl::StatusOr<BackendPtr> Split(c10d::Backend& parent, const BackendOptions& options) {
  const int parity = options.rank.rank % 2;
  std::vector<int> ranks;
  for (int rank = parity; rank < options.rank.world_size; rank += 2) ranks.push_back(rank);
  return CatchStatus("split", [&] {
    return parent.split(WithPrefix(options, absl::StrCat("split/", parity)).store, ranks,
                        parent.getBackendOptions());
  });
}

}  // namespace

absl::StatusOr<std::unique_ptr<Groups>> Groups::Make(const std::string& backend,
                                                     const BackendOptions& options) {
  DDP_ASSIGN_OR_RETURN(BackendEntry entry, BackendRegistry::Find(backend));
  std::unique_ptr<Groups> groups(new Groups(TraitsOf(backend)));
  DDP_ASSIGN_OR_RETURN(groups->world_, entry.create(WithPrefix(options, "world")));
  DDP_ASSIGN_OR_RETURN(groups->second_, entry.create(WithPrefix(options, "second")));
  DDP_ASSIGN_OR_RETURN(groups->subgroup_, entry.create(OfParity(options)));
  if (groups->world_->supportsSplitting()) {
    DDP_ASSIGN_OR_RETURN(groups->split_, Split(*groups->world_, options));
  } else {
    groups->split_ = groups->subgroup_;
  }
  return groups;
}

c10d::Backend& Groups::group(Scope scope) {
  switch (scope) {
    case Scope::kNewGroup:
      return *subgroup_;
    case Scope::kSplit:
      return *split_;
    case Scope::kTwoThreads:
      return *second_;
    case Scope::kWorld:
      break;
  }
  return *world_;
}

absl::Status Groups::Run(const Case& c, uint64_t salt) {
  if (c.scope != Scope::kTwoThreads) return RunOn(group(c.scope), c, salt);
  absl::Status second;
  std::thread thread([&] { second = RunOn(*second_, c, salt + kInFlight); });
  const absl::Status first = RunOn(*world_, c, salt);
  thread.join();
  DDP_RETURN_IF_ERROR(first);
  return Annotate(second, "in the second thread");
}

absl::Status Groups::RunOn(c10d::Backend& backend, const Case& c, uint64_t salt) {
  return CatchStatus(Name(c.op), [&] {
    std::vector<std::unique_ptr<Running>> running;
    const int calls = c.mode == Mode::kInFlight ? kInFlight : 1;
    for (int i = 0; i < calls; ++i) {
      running.push_back(std::make_unique<Running>(backend, traits_, c, salt + i));
    }
    absl::Status status;
    while (!running.empty()) {
      status.Update(running.back()->Finish());
      running.pop_back();
    }
    return status;
  });
}

}  // namespace ddp::backends::conformance
