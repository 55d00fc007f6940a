#include "checkpoint/module_state.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/log/absl_log.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/status.h"

namespace ddp::checkpoint {
namespace {

// What wrappers in Python put in front of the names of the module that they wrap:
// DistributedDataParallel and DataParallel, and torch.compile. Where a part of a model is wrapped,
// it stands within its names.
constexpr absl::string_view kWrappers[] = {"module", "_orig_mod"};

constexpr absl::string_view kCounter = "num_batches_tracked";

using Named = std::vector<std::pair<std::string, at::Tensor>>;

// Python's order differs from named_parameters() followed by named_buffers(), which go through all
// modules twice.
void Collect(const torch::nn::Module& module, const std::string& prefix, Named& out) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    out.emplace_back(absl::StrCat(prefix, item.key()), item.value());
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    out.emplace_back(absl::StrCat(prefix, item.key()), item.value());
  }
  for (const auto& child : module.named_children()) {
    if (child.value() != nullptr) {
      Collect(*child.value(), absl::StrCat(prefix, child.key(), "."), out);
    }
  }
}

Named TensorsOf(const torch::nn::Module& module) {
  Named tensors;
  Collect(module, "", tensors);
  return tensors;
}

std::string Shape(const at::Tensor& tensor) {
  return absl::StrCat("[", absl::StrJoin(tensor.sizes(), ", "), "]");
}

std::string Kind(const at::Tensor& tensor) {
  std::string kind = c10::toString(tensor.scalar_type());
  if (tensor.layout() != at::kStrided) {
    std::ostringstream layout;
    layout << tensor.layout();
    absl::StrAppend(&kind, ", ", layout.str());
  }
  return kind;
}

// "2 missing: a, b"; empty if there are none.
std::string Listing(const std::vector<std::string>& names, absl::string_view what) {
  constexpr size_t kMost = 10;
  if (names.empty()) return "";
  const size_t shown = std::min(names.size(), kMost);
  return absl::StrCat(names.size(), " ", what, ": ",
                      absl::StrJoin(names.begin(), names.begin() + shown, ", "),
                      names.size() > shown ? ", …" : "");
}

using Tensors = std::map<std::string, at::Tensor>;

// `name` without its parts `wrapper`, but for the last part, which is the tensor's own.
std::string Unwrapped(absl::string_view name, absl::string_view wrapper) {
  std::vector<absl::string_view> parts = absl::StrSplit(name, '.');
  parts.erase(std::remove(parts.begin(), parts.end() - 1, wrapper), parts.end() - 1);
  return absl::StrJoin(parts, ".");
}

// Drops `wrapper` from the names of `given`, unless the model has such names itself, or two names
// would become one. Returns how many it has changed.
size_t Unwrap(Tensors& given, const Named& wanted, absl::string_view wrapper) {
  for (const auto& [name, tensor] : wanted) {
    if (Unwrapped(name, wrapper) != name) return 0;
  }
  Tensors unwrapped;
  size_t changed = 0;
  for (const auto& [name, tensor] : given) {
    std::string shorter = Unwrapped(name, wrapper);
    if (shorter != name) ++changed;
    if (!unwrapped.emplace(std::move(shorter), tensor).second) return 0;
  }
  if (changed > 0) given = std::move(unwrapped);
  return changed;
}

// Whether `name` is the counter of a BatchNorm of which `given` has the rest: Python's have it
// since version 0.4.1, and other programs leave it out.
bool IsLackingCounter(const std::string& name, const Tensors& given) {
  absl::string_view norm = name;
  return absl::ConsumeSuffix(&norm, kCounter) && given.contains(absl::StrCat(norm, "running_mean"));
}

// Whether Tensor.copy_ would lose more than precision, or fail.
bool IsOfAnotherKind(const at::Tensor& model, const at::Tensor& given) {
  return given.layout() != at::kStrided || given.is_meta() || given.is_quantized() ||
         (given.is_complex() && !model.is_complex());
}

// What a load copies, to and from, and what it says, of a state that fits.
struct Plan {
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  std::vector<std::string> remarks;
};

absl::StatusOr<Plan> PlanOf(const torch::nn::Module& module, const c10::IValue& state) {
  if (!state.isGenericDict()) {
    return absl::InvalidArgumentError(
        absl::StrCat("model state: need a dict of tensors, got ", state.tagKind()));
  }
  Tensors given;
  for (const auto& entry : state.toGenericDict()) {
    if (!entry.key().isString() || !entry.value().isTensor() ||
        !entry.value().toTensor().defined()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "model state: need a dict of tensors, got ", entry.value().tagKind(), " under ",
          entry.key().isString() ? entry.key().toStringRef() : entry.key().tagKind()));
    }
    given.emplace(entry.key().toStringRef(), entry.value().toTensor());
  }
  const Named wanted = TensorsOf(module);
  Plan plan;
  for (absl::string_view wrapper : kWrappers) {
    if (const size_t changed = Unwrap(given, wanted, wrapper); changed > 0) {
      plan.remarks.push_back(absl::StrCat("model state: dropped '", wrapper, ".' from ", changed,
                                          " names, which a wrapper in Python put there"));
    }
  }

  const Tensors saved = given;
  std::vector<std::string> missing;
  std::vector<std::string> uncounted;
  std::vector<std::string> misshapen;
  std::vector<std::string> of_another_kind;
  for (const auto& [name, tensor] : wanted) {
    const auto found = given.find(name);
    if (found == given.end()) {
      (IsLackingCounter(name, saved) ? uncounted : missing).push_back(name);
      continue;
    }
    if (found->second.sizes() != tensor.sizes()) {
      misshapen.push_back(absl::StrCat(name, " (model ", Shape(tensor), ", checkpoint ",
                                       Shape(found->second), ")"));
    } else if (IsOfAnotherKind(tensor, found->second)) {
      of_another_kind.push_back(
          absl::StrCat(name, " (model ", Kind(tensor), ", checkpoint ", Kind(found->second), ")"));
    }
    plan.copies.emplace_back(tensor, found->second);
    given.erase(found);
  }
  std::vector<std::string> unexpected;
  for (const auto& [name, tensor] : given) unexpected.push_back(name);

  std::vector<std::string> complaints;
  for (std::string text :
       {Listing(missing, "missing in the checkpoint"), Listing(unexpected, "unknown to the model"),
        Listing(misshapen, "of another shape"),
        Listing(of_another_kind, "that cannot be converted")}) {
    if (!text.empty()) complaints.push_back(std::move(text));
  }
  if (!complaints.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("model state does not fit the model: ", absl::StrJoin(complaints, "; ")));
  }
  if (!uncounted.empty()) {
    plan.remarks.push_back(absl::StrCat(
        "model state: ", Listing(uncounted, "missing in the checkpoint, and left as they are")));
  }
  return plan;
}

}  // namespace

c10::impl::GenericDict ModuleState(const torch::nn::Module& module) {
  c10::impl::GenericDict state(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [name, tensor] : TensorsOf(module)) state.insert(name, tensor.detach());
  return state;
}

absl::Status CheckModuleState(const torch::nn::Module& module, const c10::IValue& state) {
  return PlanOf(module, state).status();
}

absl::Status LoadModuleState(torch::nn::Module& module, const c10::IValue& state,
                             std::vector<std::string>* notes) {
  DDP_ASSIGN_OR_RETURN(Plan plan, PlanOf(module, state));
  at::NoGradGuard no_grad;
  DDP_RETURN_IF_ERROR(CatchStatus("model state", [&] {
    for (auto& [to, from] : plan.copies) to.copy_(from);
  }));
  for (std::string& remark : plan.remarks) {
    if (notes == nullptr) {
      ABSL_LOG(INFO) << remark;
    } else {
      notes->push_back(std::move(remark));
    }
  }
  return absl::OkStatus();
}

}  // namespace ddp::checkpoint
