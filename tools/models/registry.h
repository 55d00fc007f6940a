// Models by name: what `--model=NAME` of //tools:train chooses from.
//
//   DDP_ASSIGN_OR_RETURN(ModelFactory make, ModelRegistry::Find("cnn"));
//   trainer::Task task = make({.input_shape = {1, 28, 28}, .num_classes = 10});
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/registry.h"
#include "ddp/trainer/task.h"

namespace ddp::tools::models {

struct ModelOptions {
  std::vector<int64_t> input_shape;  // of one example: [channels, height, width]
  int64_t num_classes = 0;
};

// InvalidArgument if the model cannot take inputs of that shape. Parameters come from torch's
// default generator: seed it first.
using ModelFactory = absl::StatusOr<trainer::Task> (*)(const ModelOptions& options);

struct ModelTag {
  static constexpr absl::string_view kWhat = "model";
};
using ModelRegistry = Registry<ModelFactory, ModelTag>;

}  // namespace ddp::tools::models
