#include "checkpoint/module_state.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/status.h"

namespace ddp::checkpoint {
namespace {

constexpr absl::string_view kWrapperPrefix = "module.";

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

// "2 missing: a, b"; empty if there are none.
std::string Listing(const std::vector<std::string>& names, absl::string_view what) {
  constexpr size_t kMost = 10;
  if (names.empty()) return "";
  const size_t shown = std::min(names.size(), kMost);
  return absl::StrCat(names.size(), " ", what, ": ",
                      absl::StrJoin(names.begin(), names.begin() + shown, ", "),
                      names.size() > shown ? ", …" : "");
}

bool AllStartWith(const std::map<std::string, at::Tensor>& tensors, absl::string_view prefix) {
  return !tensors.empty() && std::all_of(tensors.begin(), tensors.end(), [&](const auto& entry) {
    return absl::StartsWith(entry.first, prefix);
  });
}

}  // namespace

c10::impl::GenericDict ModuleState(const torch::nn::Module& module) {
  c10::impl::GenericDict state(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [name, tensor] : TensorsOf(module)) state.insert(name, tensor.detach());
  return state;
}

absl::Status LoadModuleState(torch::nn::Module& module, const c10::IValue& state) {
  if (!state.isGenericDict()) {
    return absl::InvalidArgumentError(
        absl::StrCat("model state: need a dict of tensors, got ", state.tagKind()));
  }
  std::map<std::string, at::Tensor> given;
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
  const bool own_prefix = std::any_of(wanted.begin(), wanted.end(), [](const auto& entry) {
    return absl::StartsWith(entry.first, kWrapperPrefix);
  });
  if (!own_prefix && AllStartWith(given, kWrapperPrefix)) {
    std::map<std::string, at::Tensor> unwrapped;
    for (auto& [name, tensor] : given)
      unwrapped.emplace(name.substr(kWrapperPrefix.size()), tensor);
    given = std::move(unwrapped);
  }

  std::vector<std::string> missing;
  std::vector<std::string> misshapen;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // to, from
  for (const auto& [name, tensor] : wanted) {
    const auto found = given.find(name);
    if (found == given.end()) {
      missing.push_back(name);
      continue;
    }
    if (found->second.sizes() != tensor.sizes()) {
      misshapen.push_back(absl::StrCat(name, " (model ", Shape(tensor), ", checkpoint ",
                                       Shape(found->second), ")"));
    }
    copies.emplace_back(tensor, found->second);
    given.erase(found);
  }
  std::vector<std::string> unexpected;
  for (const auto& [name, tensor] : given) unexpected.push_back(name);

  std::vector<std::string> complaints;
  for (std::string text :
       {Listing(missing, "missing in the checkpoint"), Listing(unexpected, "unknown to the model"),
        Listing(misshapen, "of another shape")}) {
    if (!text.empty()) complaints.push_back(std::move(text));
  }
  if (!complaints.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("model state does not fit the model: ", absl::StrJoin(complaints, "; ")));
  }
  at::NoGradGuard no_grad;
  return CatchStatus("model state", [&] {
    for (auto& [to, from] : copies) to.copy_(from);
  });
}

}  // namespace ddp::checkpoint
