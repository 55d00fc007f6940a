#include "ddp/zero/whole_state.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "ATen/core/List.h"
#include "ATen/core/ivalue_inl.h"
#include "ATen/ops/empty.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/xxh3.h"
#include "ddp/gather/gather.h"
#include "ddp/memory_order.h"
#include "optim/state_dict.h"

namespace ddp::zero {
namespace {

using optim::Dict;

// OK if `value` is a list of the pieces of `sizes`.
absl::Status CheckPieces(const c10::IValue& value, const std::vector<int64_t>& sizes,
                         const std::string& where) {
  const std::vector<c10::IValue> pieces = value.toListRef().vec();
  bool fits = pieces.size() == sizes.size();
  for (size_t i = 0; fits && i < pieces.size(); ++i) {
    fits = pieces[i].isTensor() && pieces[i].toTensor().defined() &&
           pieces[i].toTensor().dim() == 1 && pieces[i].toTensor().numel() == sizes[i];
  }
  if (fits) return absl::OkStatus();
  return optim::StateError(
      absl::StrCat(where, " is no list of pieces of [", absl::StrJoin(sizes, ", "), "] elements"));
}

}  // namespace

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

absl::Status CheckStates(const FlatParameters& range, const std::vector<std::string>& names,
                         const std::vector<std::optional<Dict>>& states) {
  std::vector<std::vector<int64_t>> pieces(range.parameters.size());  // sizes, by parameter
  for (const OwnedPiece& owned : range.owned) {
    pieces[owned.piece.tensor].push_back(owned.piece.size());
  }
  for (size_t i = 0; i < range.parameters.size(); ++i) {
    const NumberedParameter& parameter = range.parameters[i];
    const std::optional<Dict>& saved = states[parameter.number];
    if (!saved) continue;
    for (const std::string& name : names) {
      const auto value = optim::Find(*saved, name.c_str());
      if (!value || value->isNone()) continue;
      const std::string where = absl::StrCat("parameter group ", range.group, ": parameter ",
                                             parameter.number, ": '", name, "'");
      if (value->isList()) {
        if (absl::Status status = CheckPieces(*value, pieces[i], where); !status.ok()) {
          return status;
        }
        continue;
      }
      if (!value->isTensor() || !value->toTensor().defined()) {
        return optim::StateError(absl::StrCat(where, " is no tensor"));
      }
      if (value->toTensor().sizes() != parameter.tensor.sizes()) {
        return optim::StateError(
            absl::StrCat(where, " has shape [", absl::StrJoin(value->toTensor().sizes(), ", "),
                         "], the parameter [", absl::StrJoin(parameter.tensor.sizes(), ", "), "]"));
      }
    }
  }
  return absl::OkStatus();
}

Dict CutState(const Dict& state, const std::vector<std::string>& names,
              const NumberedParameter& parameter, const Piece& piece, size_t index) {
  Dict part = optim::NewDict();
  for (const auto& entry : state) {
    const c10::IValue& value = entry.value();
    const bool cut =
        entry.key().isString() && (value.isTensor() || value.isList()) &&
        std::find(names.begin(), names.end(), entry.key().toStringRef()) != names.end();
    if (!cut) {
      part.insert(entry.key(), value);
    } else if (value.isList()) {
      part.insert(entry.key(), value.toListRef()[index]);
    } else {
      part.insert(entry.key(), FlatInMemoryOrder(parameter.tensor, value.toTensor())
                                   .narrow(0, piece.begin, piece.size()));
    }
  }
  return part;
}

double HashOfOptions(const torch::optim::Optimizer& optimizer,
                     const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  const absl::StatusOr<const optim::OptimizerKind*> kind = optim::KindOf(optimizer);
  if (!kind.ok()) return 0;
  std::ostringstream text;
  for (const torch::optim::OptimizerParamGroup& group : groups) {
    Dict options = optim::NewDict();
    (*kind)->WriteOptions(group.options(), options);
    for (const auto& entry : options) text << entry.key() << ' ' << entry.value() << '\n';
    text << '\n';
  }
  return static_cast<double>(Xxh3(text.str()) >> 11);
}

void BroadcastOptions(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                      const optim::OptimizerKind& kind,
                      std::vector<torch::optim::OptimizerParamGroup>& groups, int source) {
  const Dict mine =
      optim::MakeStateDict(kind, groups, [](const at::Tensor&, int64_t) { return std::nullopt; });
  const absl::StatusOr<std::vector<c10::IValue>> all = AllGather(group, c10::IValue(mine));
  TORCH_CHECK(all.ok(), std::string(all.status().message()));
  for (int rank = 0; rank < group->getSize(); ++rank) {
    const absl::StatusOr<optim::ParsedState> parsed = optim::ParseState(kind, groups, (*all)[rank]);
    TORCH_CHECK(parsed.ok(), "ZeroRedundancyOptimizer: the parameter groups of rank ",
                group->getRank(), " are not those of rank ", rank,
                ". In a Join add groups before a rank runs out of inputs. ",
                std::string(parsed.status().message()));
    if (rank == source) optim::SetOptions(kind, *parsed, groups);
  }
}

}  // namespace ddp::zero
