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
#include "checkpoint/state.h"

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
  if (names.empty()) return "";
  return absl::StrCat(names.size(), " ", what, ": ", FirstNames(names));
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

// Whether Tensor.copy_ would change more than the precision of numbers, or fail.
bool IsOfAnotherKind(const at::Tensor& model, const at::Tensor& given) {
  return given.layout() != at::kStrided || given.is_meta() || given.is_quantized() ||
         (model.scalar_type() != given.scalar_type() &&
          !(model.is_floating_point() && given.is_floating_point()));
}

// "fc.weight (model Float, checkpoint Half)"
std::string KindsOf(const std::string& name, const at::Tensor& model, const at::Tensor& given) {
  return absl::StrCat(name, " (model ", Kind(model), ", checkpoint ", Kind(given), ")");
}

// What of a state fits a module, and what not.
struct Match {
  struct Copy {
    std::string name;
    at::Tensor to;
    at::Tensor from;
  };
  std::vector<Copy> copies;
  std::vector<std::string> missing;
  std::vector<std::string> uncounted;  // likewise, and may be
  std::vector<std::string> unexpected;
  std::vector<std::string> misshapen;
  std::vector<std::string> of_another_kind;
  std::vector<std::string> remarks;

  // The copies that are of another precision, in one line; empty if there are none.
  std::string Converted() const {
    std::vector<std::string> converted;
    for (const auto& [name, to, from] : copies) {
      if (to.scalar_type() != from.scalar_type()) converted.push_back(KindsOf(name, to, from));
    }
    return Listing(converted, "converted");
  }

  // What does not fit, each kind with numbers and names.
  std::vector<std::string> Complaints() const {
    std::vector<std::string> complaints;
    for (std::string text :
         {Listing(missing, "missing in the checkpoint"),
          Listing(unexpected, "unknown to the model"), Listing(misshapen, "of another shape"),
          Listing(of_another_kind, "that cannot be converted")}) {
      if (!text.empty()) complaints.push_back(std::move(text));
    }
    return complaints;
  }
};

Match MatchOf(const torch::nn::Module& module, Tensors given) {
  const Named wanted = TensorsOf(module);
  Match match;
  for (absl::string_view wrapper : kWrappers) {
    if (const size_t changed = Unwrap(given, wanted, wrapper); changed > 0) {
      match.remarks.push_back(absl::StrCat("model state: dropped '", wrapper, ".' from ", changed,
                                           " names, which a wrapper in Python put there"));
    }
  }
  const Tensors saved = given;
  for (const auto& [name, tensor] : wanted) {
    const auto found = given.find(name);
    if (found == given.end()) {
      (IsLackingCounter(name, saved) ? match.uncounted : match.missing).push_back(name);
      continue;
    }
    if (found->second.sizes() != tensor.sizes()) {
      match.misshapen.push_back(absl::StrCat(name, " (model ", Shape(tensor), ", checkpoint ",
                                             Shape(found->second), ")"));
    } else if (IsOfAnotherKind(tensor, found->second)) {
      match.of_another_kind.push_back(KindsOf(name, tensor, found->second));
    } else {
      match.copies.push_back({name, tensor, found->second});
    }
    given.erase(found);
  }
  for (const auto& [name, tensor] : given) match.unexpected.push_back(name);
  if (!match.uncounted.empty()) {
    match.remarks.push_back(
        absl::StrCat("model state: ",
                     Listing(match.uncounted, "missing in the checkpoint, and left as they are")));
  }
  return match;
}

absl::StatusOr<Match> MatchOf(const torch::nn::Module& module, const c10::IValue& state) {
  if (!state.isGenericDict()) {
    return absl::InvalidArgumentError(
        absl::StrCat("model state: need a dict of tensors, got ", KindText(state)));
  }
  Tensors given;
  for (const auto& entry : state.toGenericDict()) {
    if (!entry.key().isString() || !entry.value().isTensor() ||
        !entry.value().toTensor().defined()) {
      return absl::InvalidArgumentError(absl::StrCat("model state: need a dict of tensors, got ",
                                                     KindText(entry.value()), " under ",
                                                     KeyText(entry.key())));
    }
    given.emplace(entry.key().toStringRef(), entry.value().toTensor());
  }
  Match match = MatchOf(module, std::move(given));
  const std::vector<std::string> complaints = match.Complaints();
  if (complaints.empty()) return match;
  return absl::InvalidArgumentError(
      absl::StrCat("model state does not fit the model: ", absl::StrJoin(complaints, "; ")));
}

absl::Status CopyAll(const Match& match) {
  at::NoGradGuard no_grad;
  return CatchStatus("model state", [&] {
    for (const Match::Copy& copy : match.copies) CopyValues(copy.to, copy.from);
  });
}

bool IsTensor(const c10::IValue& value) { return value.isTensor() && value.toTensor().defined(); }

std::string TextOf(const c10::IValue& key) {
  return key.isString() ? key.toStringRef() : key.isInt() ? absl::StrCat(key.toInt()) : "?";
}

}  // namespace

void CopyValues(const at::Tensor& tensor, const at::Tensor& values) {
  at::Tensor to = tensor, from = values;
  for (int64_t i = 0; tensor.layout() == at::kStrided && i < tensor.dim(); ++i) {
    if (tensor.size(i) <= 1 || tensor.stride(i) != 0) continue;
    to = to.narrow(i, 0, 1);
    from = from.narrow(i, 0, 1);
  }
  to.copy_(from);
}

c10::impl::GenericDict ModuleState(const torch::nn::Module& module) {
  c10::impl::GenericDict state(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [name, tensor] : TensorsOf(module)) state.insert(name, tensor.detach());
  return state;
}

absl::Status CheckModuleState(const torch::nn::Module& module, const c10::IValue& state) {
  return MatchOf(module, state).status();
}

absl::Status LoadModuleState(torch::nn::Module& module, const c10::IValue& state,
                             std::vector<std::string>* notes) {
  DDP_ASSIGN_OR_RETURN(Match match, MatchOf(module, state));
  DDP_RETURN_IF_ERROR(CopyAll(match));
  if (const std::string converted = match.Converted(); !converted.empty()) {
    match.remarks.push_back(absl::StrCat("model state: ", converted));
  }
  for (std::string& remark : match.remarks) {
    if (notes == nullptr) {
      ABSL_LOG(INFO) << remark;
    } else {
      notes->push_back(std::move(remark));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<c10::impl::GenericDict> WeightsIn(const c10::impl::GenericDict& root) {
  for (const char* key : kWeightKeys) {
    const auto found = root.find(key);
    if (found != root.end() && found->value().isGenericDict()) {
      return found->value().toGenericDict();
    }
  }
  std::vector<std::string> keys;
  for (const auto& entry : root) {
    if (entry.key().isString() && IsTensor(entry.value())) return root;
    keys.push_back(TextOf(entry.key()));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "it has no weights: neither a dict under ", absl::StrJoin(kWeightKeys, ", "),
      " nor tensors at its top, but ", keys.empty() ? "nothing" : Listing(keys, "keys")));
}

absl::StatusOr<int64_t> InitModule(torch::nn::Module& module, const c10::impl::GenericDict& weights,
                                   const InitOptions& options, std::vector<std::string>& notes) {
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
  std::vector<std::string> no_tensors;
  for (const auto& entry : weights) {
    if (entry.key().isString() && IsTensor(entry.value())) {
      names.push_back(entry.key().toStringRef());
      tensors.push_back(entry.value().toTensor());
    } else {
      no_tensors.push_back(absl::StrCat(TextOf(entry.key()), " (no tensor)"));
    }
  }
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> mapped, options.map.Apply(names));
  Tensors given;
  for (size_t i = 0; i < mapped.size(); ++i) given.emplace(mapped[i], tensors[i]);
  if (const auto* adapter = dynamic_cast<const WeightAdapter*>(&module)) {
    DDP_RETURN_IF_ERROR(CatchStatus("adapting the weights to the model",
                                    [&] { adapter->AdaptWeights(given, notes); }));
  }
  Match match = MatchOf(module, std::move(given));
  match.unexpected.insert(match.unexpected.end(), no_tensors.begin(), no_tensors.end());
  const auto has_another_name = [&, wanted = TensorsOf(module)](const std::string& name) {
    const auto is_it = [&](const auto& one) { return one.first == name; };
    const at::Tensor& tensor = std::find_if(wanted.begin(), wanted.end(), is_it)->second;
    return std::any_of(match.copies.begin(), match.copies.end(),
                       [&](const Match::Copy& copy) { return copy.to.is_same(tensor); });
  };
  std::erase_if(match.missing, has_another_name);

  const std::vector<std::string> complaints = match.Complaints();
  if (options.strict && !complaints.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the weights do not fit the model: ", absl::StrJoin(complaints, "; ")));
  }
  if (match.copies.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("nothing in it fits the model: ", absl::StrJoin(complaints, "; ")));
  }
  DDP_RETURN_IF_ERROR(CopyAll(match));
  std::vector<std::string> kept = match.missing;
  for (const std::vector<std::string>* others : {&match.misshapen, &match.of_another_kind}) {
    kept.insert(kept.end(), others->begin(), others->end());
  }
  notes.insert(notes.end(), match.remarks.begin(), match.remarks.end());
  for (std::string text :
       {match.Converted(), Listing(match.unexpected, "in the checkpoint found no place"),
        Listing(kept, "in the model kept their initial values")}) {
    if (!text.empty()) notes.push_back(std::move(text));
  }
  return static_cast<int64_t>(match.copies.size());
}

}  // namespace ddp::checkpoint
