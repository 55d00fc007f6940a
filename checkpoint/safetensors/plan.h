// Decides where each value of a state stands in a checkpoint folder, before anything is written.
//
//   DDP_ASSIGN_OR_RETURN(Plan plan, PlanOf(state.root));
//   plan.model.entries                           "fc.weight", …
//   plan.training.entries                        "optimizer.state.0.exp_avg", …
//   plan.tree                                    the other values, and where the tensors are
//
// Tensors at the path "model" and below are in the file of the model, under their names without
// "model"; all others are in that of the training state, under their path with dots. Names that
// would be equal get "#2", "#3", ….
//
// Tensors that are the same elements of one storage are written once, under the first name in
// alphabetical order. In the model the other names stand in the metadata, "head.weight":
// "embed.weight", as safetensors.torch.save_model does. All other tensors are written by
// themselves, those too that share a part of their memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/format.h"
#include "checkpoint/safetensors/header.h"
#include "nlohmann/json.hpp"

namespace ddp::checkpoint::safetensors {

// Names of the files. The training state is encoded as the model is, but its name does not end in
// ".safetensors": programs that take all such files of a folder are to find weights only.
inline constexpr char kModelFile[] = "model.safetensors";
inline constexpr char kTrainingFile[] = "training_state";

// The tensors of one file.
struct PlannedFile {
  std::vector<TensorEntry> entries;  // without places
  std::map<std::string, at::Tensor> tensors;
  Metadata aliases;
};

struct Plan {
  PlannedFile model;
  PlannedFile training;
  nlohmann::json tree;  // see tree_json.h; a tensor is "model.safetensors/fc.weight"
};

// InvalidArgument names the path of a value that the format cannot hold. Tensors on the device meta
// are those of `source`, which may be null. Thread-safe.
absl::StatusOr<Plan> PlanOf(const c10::IValue& root, const TensorSource* source);

// The tensor's bytes as the file has them: row-major, on the CPU. `tensor` itself where it is so.
at::Tensor RowMajor(const at::Tensor& tensor);

}  // namespace ddp::checkpoint::safetensors
