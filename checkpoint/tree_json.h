// A tree of values (state.h) as JSON, with names in the place of tensors:
//
//   None, bool, int, str    null, true, 3, "text"
//   float                   a number with a point or an exponent; {"float": "NaN"}, "Infinity", …
//   list, tuple             {"list": […]}, {"tuple": […]}
//   dict                    {"dict": [[key, value], …]}, in its order; keys are str or int
//   tensor                  {"tensor": "model.fc.weight"}
//
//   DDP_ASSIGN_OR_RETURN(nlohmann::json json, TreeToJson(state.root, name_of));
//   DDP_ASSIGN_OR_RETURN(c10::IValue value, TreeFromJson(json, tensor_of));
#pragma once

#include <ATen/core/ivalue.h>

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace ddp::checkpoint {

// Deeper trees are refused.
constexpr int kMaxTreeDepth = 100;

// Returns the name of the tensor at `path` (keys and indices, joined by '/').
using NameOfTensor =
    std::function<absl::StatusOr<std::string>(const std::string& path, const at::Tensor& tensor)>;

// InvalidArgument names the path of a value that a tree cannot hold. Functions are thread-safe.
absl::StatusOr<nlohmann::json> TreeToJson(const c10::IValue& tree, const NameOfTensor& name_of);

using TensorOfName = std::function<absl::StatusOr<c10::IValue>(const std::string& name)>;

// The reverse. DataLoss if `json` is no such tree.
absl::StatusOr<c10::IValue> TreeFromJson(const nlohmann::json& json, const TensorOfName& tensor_of);

// Returns member `kind` of a tensor's or dict's JSON; null: it is something else.
const nlohmann::json* MemberOf(const nlohmann::json& json, const char* kind);
// Whether `json` is a list of pairs, with a str or an int first.
bool ArePairs(const nlohmann::json& json);

}  // namespace ddp::checkpoint
