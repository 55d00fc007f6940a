// The optimizer's state as one logical whole: gathered from all ranks, and taken apart again.
#include <algorithm>
#include <map>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/empty_like.h"
#include "ATen/ops/scalar_tensor.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "c10/core/GradMode.h"
#include "ddp/collective_status.h"
#include "ddp/memory_order.h"
#include "ddp/zero/zero_redundancy_optimizer.h"
#include "optim/state_dict.h"

namespace ddp::zero {
namespace {

using optim::Dict;
using optim::OptimizerKind;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

constexpr char kMasterWeight[] = "master_weight";

// All entries that a parameter of this group may have, as tensors of its shape.
std::vector<std::string> TensorEntries(const OptimizerKind& kind,
                                       const OptimizerParamGroup& group) {
  std::vector<std::string> names = kind.PerElement(group.options());
  names.push_back(kMasterWeight);
  return names;
}

// "669,706".
std::string Grouped(int64_t number) {
  const std::string digits = absl::StrCat(number);
  std::string grouped;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) grouped.push_back(',');
    grouped.push_back(digits[i]);
  }
  return grouped;
}

// Returns the dimensions from the slowest to the fastest one in memory.
std::vector<int64_t> MemoryOrder(const at::Tensor& tensor) {
  std::vector<int64_t> order(tensor.dim());
  for (int64_t i = 0; i < tensor.dim(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return tensor.stride(a) > tensor.stride(b); });
  return order;
}

// A parameter without elements has no owner. It has been stepped as the others of its group have.
void AddStatesOfEmptyParameters(const FlatParameters& range, std::map<int64_t, Dict>& states) {
  const Dict* example = nullptr;
  for (const NumberedParameter& parameter : range.parameters) {
    const auto state = states.find(parameter.number);
    if (state != states.end() && example == nullptr) example = &state->second;
  }
  if (example == nullptr) return;
  for (const NumberedParameter& parameter : range.parameters) {
    if (parameter.tensor.numel() != 0) continue;
    Dict state = optim::NewDict();
    for (const auto& entry : *example) {
      const at::Tensor& value = entry.value().toTensor();
      state.insert(entry.key(),
                   value.dim() == 0 ? value : at::empty(parameter.tensor.sizes(), value.options()));
    }
    states.emplace(parameter.number, std::move(state));
  }
}

}  // namespace

// Empty if the inner optimizer keeps nothing for the piece.
Dict ZeroRedundancyOptimizer::EntriesOf(const OptimizerKind& kind, const OwnedPiece& owned) const {
  Dict entries = optim::NewDict();
  const auto state = inner_->state().find(owned.updated.unsafeGetTensorImpl());
  if (state != inner_->state().end()) {
    std::optional<Dict> written = kind.WriteState(*state->second);
    if (written) entries = *std::move(written);
  }
  const bool stateless = kind.Scalars().empty();
  if (owned.has_master() && (stateless || !entries.empty())) {
    entries.insert(kMasterWeight, owned.updated);
  }
  return entries;
}

// Returns the pieces of all ranks, in the same order on each rank.
std::vector<ZeroRedundancyOptimizer::PieceOfRank> ZeroRedundancyOptimizer::AllPieces() const {
  std::vector<PieceOfRank> pieces;
  for (const FlatParameters& range : ranges_) {
    for (int owner = 0; owner < world_size(); ++owner) {
      size_t next_owned = 0;
      for (const Piece& piece : range.partition.Pieces(owner)) {
        const OwnedPiece* owned = owner == rank() ? &range.owned[next_owned++] : nullptr;
        pieces.push_back({.range = &range, .owner = owner, .piece = piece, .owned = owned});
      }
    }
  }
  return pieces;
}

// A row per piece: whether it has state, its scalars, and which tensor entries there are.
// Collective: every rank fills in its own pieces' rows.
at::Tensor ZeroRedundancyOptimizer::ExchangeStateTable(
    const OptimizerKind& kind, const std::vector<PieceOfRank>& pieces) const {
  const std::vector<std::string> scalars = kind.Scalars();
  size_t width = 1;
  for (const FlatParameters& range : ranges_) {
    const size_t names = TensorEntries(kind, param_groups_[range.group]).size();
    width = std::max(width, 1 + scalars.size() + names);
  }
  at::Tensor table =
      at::zeros({static_cast<int64_t>(pieces.size()), static_cast<int64_t>(width)}, at::kDouble);
  auto rows = table.accessor<double, 2>();
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i].owned == nullptr) continue;
    const Dict entries = EntriesOf(kind, *pieces[i].owned);
    auto row = rows[static_cast<int64_t>(i)];
    int64_t column = 0;
    row[column++] = entries.empty() ? 0 : 1;
    for (const std::string& scalar : scalars) {
      const auto value = optim::Find(entries, scalar.c_str());
      row[column++] = value ? optim::AsNumber(*value).value_or(0) : 0;
    }
    for (const std::string& name : TensorEntries(kind, param_groups_[pieces[i].range->group])) {
      row[column++] = entries.contains(name) ? 1 : 0;
    }
  }
  if (!group_ || pieces.empty()) return table;
  table = table.to(ranges_[0].storage.device());
  AllReduce(table, c10d::ReduceOp::SUM);
  return table.cpu();
}

// Collective between the ranks that have a part in it. `source`: on the owner; `slice`: where the
// piece goes, on ranks that receive.
void ZeroRedundancyOptimizer::MovePiece(int owner, int to, const at::Tensor& source,
                                        at::Tensor slice) const {
  if (owner == rank() && slice.defined()) slice.copy_(source);
  if (!group_ || owner == to) return;
  if (to == kAllRanks) {
    std::vector<at::Tensor> message = {slice};
    c10d::BroadcastOptions options;
    options.rootRank = owner;
    group_->broadcast(message, options)->wait();
  } else if (owner == rank()) {
    std::vector<at::Tensor> message = {source};
    group_->send(message, to, /*tag=*/0)->wait();
  } else if (to == rank()) {
    std::vector<at::Tensor> message = {slice};
    group_->recv(message, owner, /*tag=*/0)->wait();
  }
}

absl::StatusOr<Dict> ZeroRedundancyOptimizer::ConsolidateStateDict(int to) {
  if (to != kAllRanks && (to < 0 || to >= world_size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("ConsolidateStateDict: no rank ", to, " in a group of ", world_size()));
  }
  if (joined()) {
    return absl::FailedPreconditionError(
        "ConsolidateStateDict: ranks that have run out of inputs do not shadow it; call it after "
        "the Join");
  }
  DDP_ASSIGN_OR_RETURN(const OptimizerKind* kind, optim::KindOf(*inner_));
  const bool receives = to == kAllRanks || to == rank();
  std::map<int64_t, Dict> states;  // by number
  DDP_RETURN_IF_ERROR(CatchCollective("gathering the optimizer's state", [&] {
    const c10::NoGradGuard no_grad;
    WaitForParameters();
    AddNewParamGroups();
    const std::vector<PieceOfRank> pieces = AllPieces();
    const at::Tensor table = ExchangeStateTable(*kind, pieces);
    const auto rows = table.accessor<double, 2>();
    for (size_t i = 0; i < pieces.size(); ++i) {
      const auto row = rows[static_cast<int64_t>(i)];
      if (row[0] == 0) continue;
      const PieceOfRank& remote = pieces[i];
      const NumberedParameter& parameter = remote.range->parameters[remote.piece.tensor];
      const Dict mine =
          remote.owned == nullptr ? optim::NewDict() : EntriesOf(*kind, *remote.owned);
      auto [entry, fresh] = states.emplace(parameter.number, optim::NewDict());
      Dict& state = entry->second;
      int64_t column = 1;
      for (const std::string& scalar : kind->Scalars()) {
        if (fresh) state.insert(scalar, at::scalar_tensor(row[column], at::kFloat));
        ++column;
      }
      const at::TensorOptions like =
          parameter.tensor.detach().options().dtype(StateDtype(parameter.tensor));
      for (const std::string& name : TensorEntries(*kind, param_groups_[remote.range->group])) {
        if (row[column++] == 0) continue;
        at::Tensor slice, source;
        if (receives) {
          if (!state.contains(name)) {
            state.insert(name, at::zeros_like(parameter.tensor.detach(), like));
          }
          slice = FlatInMemoryOrder(parameter.tensor, state.at(name).toTensor())
                      .narrow(0, remote.piece.begin, remote.piece.size());
        }
        if (remote.owned != nullptr) source = mine.at(name).toTensor().flatten();
        MovePiece(remote.owner, to, source, slice);
      }
    }
    for (const FlatParameters& range : ranges_) AddStatesOfEmptyParameters(range, states);
    if (!receives) states.clear();
  }));
  return optim::MakeStateDict(*kind, param_groups_,
                              [&](const at::Tensor&, int64_t number) -> std::optional<Dict> {
                                const auto state = states.find(number);
                                if (state == states.end()) return std::nullopt;
                                return state->second;
                              });
}

// Returns the dtype of the tensors in a parameter's state.
at::ScalarType ZeroRedundancyOptimizer::StateDtype(const at::Tensor& parameter) const {
  const at::ScalarType dtype = parameter.scalar_type();
  return options_.master_weights && IsReducedPrecision(dtype) ? at::kFloat : dtype;
}

absl::Status ZeroRedundancyOptimizer::LoadStateDict(const c10::IValue& state) {
  return CatchStatus("optimizer state", [&]() -> absl::Status {
    const c10::NoGradGuard no_grad;
    WaitForParameters();
    AddNewParamGroups();
    DDP_ASSIGN_OR_RETURN(const OptimizerKind* kind, optim::KindOf(*inner_));
    DDP_ASSIGN_OR_RETURN(optim::ParsedState parsed, optim::ParseState(*kind, param_groups_, state));
    // All that changes is made before anything is changed; all shapes are checked on every rank.
    std::vector<std::pair<const OwnedPiece*, std::unique_ptr<OptimizerParamState>>> states;
    std::vector<std::pair<const OwnedPiece*, at::Tensor>> masters;
    for (const FlatParameters& range : ranges_) {
      const auto& options = *parsed.options[range.group];
      std::vector<std::string> names = kind->PerElement(options);
      names.push_back(kMasterWeight);
      for (const NumberedParameter& parameter : range.parameters) {
        const std::optional<Dict>& saved = parsed.states[parameter.number];
        if (!saved) continue;
        for (const std::string& name : names) {
          const auto value = optim::Find(*saved, name.c_str());
          if (!value || value->isNone()) continue;
          const std::string where = absl::StrCat("parameter group ", range.group, ": parameter ",
                                                 parameter.number, ": '", name, "'");
          if (!value->isTensor() || !value->toTensor().defined()) {
            return optim::StateError(absl::StrCat(where, " is no tensor"));
          }
          if (value->toTensor().sizes() != parameter.tensor.sizes()) {
            return optim::StateError(absl::StrCat(
                where, " has shape [", absl::StrJoin(value->toTensor().sizes(), ", "),
                "], the parameter [", absl::StrJoin(parameter.tensor.sizes(), ", "), "]"));
          }
        }
      }
      for (const OwnedPiece& owned : range.owned) {
        const NumberedParameter& parameter = range.parameters[owned.piece.tensor];
        const std::optional<Dict>& saved = parsed.states[parameter.number];
        std::optional<at::Tensor> master;
        if (saved) {
          Dict part = optim::NewDict();
          for (const auto& entry : *saved) {
            const bool cut =
                entry.key().isString() && entry.value().isTensor() &&
                std::find(names.begin(), names.end(), entry.key().toStringRef()) != names.end();
            part.insert(
                entry.key(),
                cut ? c10::IValue(FlatInMemoryOrder(parameter.tensor, entry.value().toTensor())
                                      .narrow(0, owned.piece.begin, owned.piece.size()))
                    : entry.value());
          }
          const auto found = optim::Find(part, kMasterWeight);
          if (found && found->isTensor()) master = found->toTensor();
          (void)part.erase(kMasterWeight);
          absl::StatusOr<std::unique_ptr<OptimizerParamState>> read =
              kind->ReadState(part, owned.updated, options);
          if (!read.ok()) {
            return Annotate(read.status(), absl::StrCat("parameter group ", range.group,
                                                        ": parameter ", parameter.number));
          }
          if (*read != nullptr) states.emplace_back(&owned, *std::move(read));
        }
        if (owned.has_master()) masters.emplace_back(&owned, master.value_or(owned.value));
      }
    }
    for (size_t g = 0; g < param_groups_.size(); ++g) {
      param_groups_[g].set_options(std::move(parsed.options[g]));
    }
    CopyOptions();
    inner_->state().clear();
    for (auto& [owned, read] : states) {
      inner_->state()[owned->updated.unsafeGetTensorImpl()] = std::move(read);
    }
    for (auto& [owned, master] : masters) at::Tensor(owned->updated).copy_(master);
    return absl::OkStatus();
  });
}

absl::StatusOr<std::vector<LocalState>> ZeroRedundancyOptimizer::LocalStates() const {
  DDP_ASSIGN_OR_RETURN(const OptimizerKind* kind, optim::KindOf(*inner_));
  std::vector<LocalState> states;
  for (const FlatParameters& range : ranges_) {
    for (const OwnedPiece& owned : range.owned) {
      Dict entries = EntriesOf(*kind, owned);
      if (entries.empty()) continue;
      const NumberedParameter& parameter = range.parameters[owned.piece.tensor];
      states.push_back({.parameter = parameter.number,
                        .global_shape = parameter.tensor.sizes().vec(),
                        .memory_order = MemoryOrder(parameter.tensor),
                        .begin = owned.piece.begin,
                        .end = owned.piece.end,
                        .entries = std::move(entries)});
    }
  }
  return states;
}

std::unique_ptr<torch::optim::Optimizer> ZeroRedundancyOptimizer::UnshardedLikeThis() const {
  std::vector<OptimizerParamGroup> groups;
  for (const OptimizerParamGroup& group : param_groups_) {
    std::vector<at::Tensor> like;
    for (const at::Tensor& parameter : group.params()) {
      like.push_back(at::empty_like(parameter.detach(),
                                    parameter.detach().options().dtype(StateDtype(parameter))));
    }
    groups.emplace_back(std::move(like), group.options().clone());
  }
  return factory_(std::move(groups));
}

void ZeroRedundancyOptimizer::save(torch::serialize::OutputArchive& archive) const {
  // Waits for parameters at most, which changes nothing that a caller sees.
  auto* self = const_cast<ZeroRedundancyOptimizer*>(this);
  const absl::StatusOr<Dict> whole = self->ConsolidateStateDict(kAllRanks);
  TORCH_CHECK(whole.ok(), std::string(whole.status().message()));
  const std::unique_ptr<torch::optim::Optimizer> unsharded = UnshardedLikeThis();
  const absl::Status loaded = optim::LoadOptimizerState(*unsharded, *whole);
  TORCH_CHECK(loaded.ok(), std::string(loaded.message()));
  unsharded->save(archive);
}

void ZeroRedundancyOptimizer::load(torch::serialize::InputArchive& archive) {
  const std::unique_ptr<torch::optim::Optimizer> unsharded = UnshardedLikeThis();
  unsharded->load(archive);
  const absl::StatusOr<Dict> whole = optim::OptimizerState(*unsharded);
  TORCH_CHECK(whole.ok(), std::string(whole.status().message()));
  const absl::Status loaded = LoadStateDict(*whole);
  TORCH_CHECK(loaded.ok(), std::string(loaded.message()));
}

std::string ZeroRedundancyOptimizer::Describe() const {
  const absl::StatusOr<const OptimizerKind*> kind = optim::KindOf(*inner_);
  int64_t own = 0, all = 0;
  double own_bytes = 0, all_bytes = 0;
  for (const FlatParameters& range : ranges_) {
    int64_t elements = 0;
    for (int i = 0; i < range.partition.num_tensors(); ++i) elements += range.partition.numel(i);
    const int64_t mine = range.partition.OwnedElements(rank());
    const bool master = !range.owned.empty() && range.owned[0].has_master();
    double bytes = 0;
    if (kind.ok()) {
      const auto entries = (*kind)->PerElement(param_groups_[range.group].options()).size();
      bytes = static_cast<double>(entries * (master ? 4 : range.storage.element_size()));
    }
    if (master) bytes += 4;
    own += mine;
    all += elements;
    own_bytes += bytes * static_cast<double>(mine);
    all_bytes += bytes * static_cast<double>(elements);
  }
  return absl::StrCat("zero stage ", options_.stage, ": rank ", rank(), " holds ", Grouped(own),
                      " of ", Grouped(all), " elements, state ",
                      absl::StrFormat("%.1f of %.1f MB", own_bytes / 1e6, all_bytes / 1e6));
}

}  // namespace ddp::zero
