#include "ddp/zero/flat_parameters.h"

#include <algorithm>
#include <map>
#include <typeinfo>
#include <utility>

#include "ATen/ops/as_strided.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/empty_like.h"
#include "ATen/ops/from_blob.h"
#include "ATen/ops/where.h"
#include "ATen/ops/zeros.h"
#include "ATen/ops/zeros_like.h"
#include "absl/strings/str_cat.h"
#include "base/option_error.h"
#include "c10/core/GradMode.h"
#include "c10/util/Type.h"
#include "ddp/collective_memory.h"
#include "optim/kind.h"
#include "torch/csrc/distributed/c10d/comm.hpp"
#include "torch/optim/lbfgs.h"

namespace ddp::zero {
namespace {

// The most bytes of gradients that are one message.
constexpr size_t kBroadcastBytes = 25 * 1024 * 1024;

constexpr char kBeingGathered[] =
    "ZeroRedundancyOptimizer: with zero.overlap_gather, parameters are being gathered from step() "
    "to "
    "the next forward of the wrapped model; call WaitForParameters() of the optimizer before "
    "anything else reads or writes them";

// The memory that a tensor's elements lie in, from the first to the last.
std::pair<const char*, const char*> Extent(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.element_size())};
}

Partition Divide(const std::vector<NumberedParameter>& parameters, const ZeroOptions& options,
                 int world_size) {
  std::vector<int64_t> numels;
  for (const NumberedParameter& parameter : parameters) {
    numels.push_back(parameter.tensor.numel());
  }
  const auto element_bytes = static_cast<int64_t>(parameters[0].tensor.element_size());
  // Stage 1 has no buckets: its gradients are another's.
  const int64_t max_block_bytes =
      options.stage < 2
          ? 0
          : std::max<int64_t>(1, static_cast<int64_t>(options.bucket_cap_mb * 1024 * 1024));
  return options.partition == "tensor"
             ? Partition::ByTensor(numels, element_bytes, world_size, max_block_bytes)
             : Partition::Flat(numels, element_bytes, world_size, max_block_bytes);
}

// The same memory in a StorageImpl of its own.
at::Tensor Alias(const at::Tensor& storage) {
  return at::from_blob(
      storage.mutable_data_ptr(), storage.sizes(), [storage](void*) {}, storage.options());
}

// Where the parameter's value is no longer the rounded copy, the copy becomes the value.
void TakeInValue(const OwnedPiece& owned) {
  if (!owned.has_master()) return;
  at::Tensor master = owned.updated;
  const at::Tensor same = owned.value.eq(master.to(owned.value.scalar_type()));
  master.copy_(at::where(same, master, owned.value.to(master.scalar_type())));
}

// LibTorch before 2.15 cannot allow access again, so there it stays allowed.
template <typename Storage>
void SetAccess([[maybe_unused]] Storage* storage, [[maybe_unused]] bool allowed) {
  if constexpr (requires { storage->clear_data_ptr_access_error_msg_(); }) {
    if (allowed) {
      storage->clear_data_ptr_access_error_msg_();
    } else {
      storage->release_data_and_set_meta_custom_data_ptr_error_msg_(kBeingGathered);
    }
  }
}

std::vector<at::Tensor> ParametersOf(const std::deque<FlatParameters>& ranges) {
  std::vector<at::Tensor> parameters;
  for (const FlatParameters& range : ranges) {
    for (const NumberedParameter& parameter : range.parameters) {
      parameters.push_back(parameter.tensor);
    }
  }
  return parameters;
}

}  // namespace

void TakeInValues(FlatParameters& flat) {
  const c10::NoGradGuard no_grad;
  const bool has_masters = !flat.owned.empty() && flat.owned[0].has_master();
  std::vector<bool> changed;
  for (size_t i = 0; i < flat.parameters.size(); ++i) {
    NumberedParameter& parameter = flat.parameters[i];
    at::Tensor& tensor = parameter.tensor;
    if (tensor.numel() == 0 && parameter.view.numel() == 0) continue;
    bool is_new = has_masters && tensor._version() != parameter.version;
    if (tensor.const_data_ptr() != parameter.view.const_data_ptr()) {
      TORCH_CHECK(tensor.scalar_type() == parameter.view.scalar_type() &&
                      tensor.device() == parameter.view.device() &&
                      tensor.sizes() == parameter.view.sizes(),
                  "ZeroRedundancyOptimizer: parameter ", parameter.number, " was ",
                  parameter.view.toString(), " ", parameter.view.sizes(), " on ",
                  parameter.view.device(), " when the optimizer was made, and now is ",
                  tensor.toString(), " ", tensor.sizes(), " on ", tensor.device(),
                  "; make the optimizer after Module::to");
      parameter.view.copy_(tensor);
      tensor.set_data(parameter.view);
      is_new = true;
    }
    if (!is_new) continue;
    parameter.version = tensor._version();
    changed.resize(flat.parameters.size());
    changed[i] = true;
  }
  if (changed.empty()) return;
  for (const OwnedPiece& owned : flat.owned) {
    if (changed[owned.piece.tensor]) TakeInValue(owned);
  }
}

at::Tensor DenseGradient(const NumberedParameter& parameter) {
  at::Tensor& gradient = parameter.tensor.mutable_grad();
  TORCH_CHECK(!gradient.is_sparse(), "ZeroRedundancyOptimizer: parameter ", parameter.number,
              " has a sparse gradient, which cannot be divided; use zero.stage=0, or a parameter "
              "group of another optimizer");
  if (gradient.strides() != parameter.tensor.strides()) {
    gradient = at::empty_like(parameter.tensor.detach(), gradient.options()).copy_(gradient);
  }
  return gradient;
}

std::vector<at::Tensor> DenseGradients(const std::deque<FlatParameters>& ranges) {
  std::vector<at::Tensor> gradients;
  for (const FlatParameters& range : ranges) {
    for (const NumberedParameter& parameter : range.parameters) {
      if (parameter.tensor.grad().defined()) gradients.push_back(DenseGradient(parameter));
    }
  }
  return gradients;
}

void BroadcastGradients(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                        const std::deque<FlatParameters>& ranges, int source) {
  const std::vector<at::Tensor> parameters = ParametersOf(ranges);
  if (parameters.empty()) return;
  at::Tensor has_gradient = at::zeros({static_cast<int64_t>(parameters.size())}, at::kByte);
  for (size_t i = 0; i < parameters.size(); ++i) {
    has_gradient.mutable_data_ptr<uint8_t>()[i] = parameters[i].grad().defined() ? 1 : 0;
  }
  std::vector<at::Tensor> message = {has_gradient.to(parameters[0].device())};
  c10d::BroadcastOptions options;
  options.rootRank = source;
  group->broadcast(message, options)->wait();
  has_gradient = message[0].cpu();
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor& gradient = parameters[i].mutable_grad();
    if (has_gradient.const_data_ptr<uint8_t>()[i] == 0) {
      gradient.reset();
    } else if (!gradient.defined()) {
      gradient = at::zeros_like(parameters[i]);
    }
  }
  const std::vector<at::Tensor> gradients = DenseGradients(ranges);
  if (!gradients.empty()) c10d::broadcast_coalesced(group, gradients, kBroadcastBytes, source);
}

void BroadcastValues(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                     const std::deque<FlatParameters>& ranges, int source) {
  const std::vector<at::Tensor> parameters = ParametersOf(ranges);
  if (!parameters.empty()) c10d::broadcast_coalesced(group, parameters, kBroadcastBytes, source);
}

void RefuseAccess(const FlatParameters& flat) {
  if (flat.guarded.defined()) SetAccess(flat.guarded.storage().unsafeGetStorageImpl(), false);
}

void AllowAccess(const FlatParameters& flat) {
  if (flat.guarded.defined()) SetAccess(flat.guarded.storage().unsafeGetStorageImpl(), true);
}

absl::Status CheckParameters(const std::vector<NumberedParameter>& parameters) {
  struct Used {
    const char* begin;
    const char* end;
    int64_t number;
    const void* identity;
  };
  std::vector<Used> used;
  for (const auto& [number, tensor, view, version] : parameters) {
    if (!tensor.defined() || !tensor.is_floating_point() || tensor.layout() != at::kStrided) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter ", number,
                       " is not a dense tensor of floating point; ZeroRedundancyOptimizer "
                       "takes no others"));
    }
    if (tensor.numel() == 0) continue;
    const auto [begin, end] = Extent(tensor);
    used.push_back({begin, end, number, tensor.unsafeGetTensorImpl()});
  }
  std::sort(used.begin(), used.end(),
            [](const Used& a, const Used& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < used.size(); ++i) {
    if (used[i].begin >= used[i - 1].end) continue;
    const int64_t first = std::min(used[i - 1].number, used[i].number);
    const int64_t second = std::max(used[i - 1].number, used[i].number);
    return absl::InvalidArgumentError(
        used[i].identity == used[i - 1].identity
            ? absl::StrCat("parameter ", second, " is parameter ", first,
                           " again; give each parameter once")
            : absl::StrCat("parameters ", first, " and ", second,
                           " share memory: one is a view of the other; give one of them"));
  }
  return absl::OkStatus();
}

absl::Status CheckOptimizer(const torch::optim::Optimizer& inner, const std::string& partition) {
  if (dynamic_cast<const torch::optim::LBFGS*>(&inner) != nullptr) {
    return absl::InvalidArgumentError(
        "LBFGS cannot be sharded: its update couples all parameters; use zero.stage=0");
  }
  if (partition != "flat") return absl::OkStatus();
  const absl::StatusOr<const optim::OptimizerKind*> kind = optim::KindOf(inner);
  if (kind.ok() && (*kind)->elementwise()) return absl::OkStatus();
  const std::string name =
      kind.ok() ? std::string((*kind)->name()) : c10::demangle(typeid(inner).name());
  return OptionError(
      "zero.partition", "flat",
      absl::StrCat(
          "cuts tensors, but ", name,
          kind.ok() ? " looks at whole ones" : " is not known to update each element by itself",
          "; use zero.partition=tensor, or describe it by an OptimizerKind (optim/kind.h)"));
}

std::vector<FlatParameters> FlattenParameters(const std::vector<NumberedParameter>& parameters,
                                              int group_index, const ZeroOptions& options,
                                              c10d::ProcessGroup* group) {
  const c10::NoGradGuard no_grad;
  const int rank = group == nullptr ? 0 : group->getRank();
  const int world_size = group == nullptr ? 1 : group->getSize();
  std::vector<std::vector<NumberedParameter>> alike;
  std::map<std::pair<std::string, at::ScalarType>, size_t> index;
  for (const NumberedParameter& parameter : parameters) {
    if (!parameter.tensor.requires_grad()) continue;
    const auto key = std::pair(parameter.tensor.device().str(), parameter.tensor.scalar_type());
    const auto [entry, fresh] = index.emplace(key, alike.size());
    if (fresh) alike.emplace_back();
    alike[entry->second].push_back(parameter);
  }
  std::vector<FlatParameters> ranges;
  for (std::vector<NumberedParameter>& members : alike) {
    Partition partition = Divide(members, options, world_size);
    const at::TensorOptions like = members[0].tensor.detach().options();
    at::Tensor storage = AllocateForCollectives(group, partition.storage_size(), like);
    storage.zero_();  // the padding is sent, too
    const bool guards = options.overlap_gather && world_size > 1;
    const at::Tensor guarded = guards ? Alias(storage) : at::Tensor();
    for (size_t i = 0; i < members.size(); ++i) {
      at::Tensor& parameter = members[i].tensor;
      const std::vector<int64_t> strides =
          parameter.is_non_overlapping_and_dense()
              ? parameter.strides().vec()
              : at::empty_like(parameter, at::MemoryFormat::Contiguous).strides().vec();
      const at::Tensor view = at::as_strided(guards ? guarded : storage, parameter.sizes(), strides,
                                             partition.offset(static_cast<int>(i)));
      view.copy_(parameter);
      parameter.set_data(view);
      members[i].view = view;
      members[i].version = parameter._version();
    }
    FlatParameters range = {.group = group_index,
                            .parameters = std::move(members),
                            .partition = std::move(partition),
                            .storage = storage,
                            .guarded = guarded};
    for (const Piece& piece : range.partition.Pieces(rank)) {
      const int64_t begin = range.partition.offset(piece.tensor) + piece.begin;
      const at::Tensor value = storage.narrow(0, begin, piece.size());
      const bool master = options.master_weights && IsReducedPrecision(value.scalar_type());
      range.owned.push_back({piece, value, master ? value.to(at::kFloat) : value});
    }
    const std::vector<Block>& blocks = range.partition.blocks();
    if (!blocks.empty() && blocks[0].owners < world_size) {
      range.head = at::zeros({blocks[0].part * world_size}, like);
    }
    ranges.push_back(std::move(range));
  }
  return ranges;
}

}  // namespace ddp::zero
