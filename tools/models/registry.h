// Models by name: what `--model=NAME` of //tools:train chooses from.
//
//   DDP_ASSIGN_OR_RETURN(trainer::Task task, Make({.name = "cnn",
//                                                  .input_shape = {1, 28, 28},
//                                                  .num_classes = 10}));
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/options.h"
#include "base/registry.h"
#include "base/status.h"
#include "ddp/trainer/task.h"

namespace ddp::tools::models {

struct ModelOptions;

// InvalidArgument if the model cannot take inputs of that shape. Parameters come from torch's
// default generator: seed it first.
using ModelFactory = absl::StatusOr<trainer::Task> (*)(const ModelOptions& options);

struct ModelTag {
  static constexpr absl::string_view kWhat = "model";
};
using ModelRegistry = Registry<ModelFactory, ModelTag>;

struct ModelOptions {
  std::string name = "mlp";
  // Models that gain by it run in channels-last order (see trainer::Task).
  bool channels_last = true;

  // From the data set.
  std::vector<int64_t> input_shape = {};  // of one example: [channels, height, width]
  int64_t num_classes = 0;
};

constexpr auto OptionsOf(const ModelOptions&) {
  return Options(
      Option("name", &ModelOptions::name, "what to train").OneOfThese(&ModelRegistry::Names),
      Option("channels_last", &ModelOptions::channels_last,
             "convolutional models on the CPU in channels-last order"));
}

// The model of that name. NotFound, listing what is linked in, for an unknown one.
inline absl::StatusOr<trainer::Task> Make(const ModelOptions& options) {
  DDP_ASSIGN_OR_RETURN(const ModelFactory make, ModelRegistry::Find(options.name));
  DDP_ASSIGN_OR_RETURN(trainer::Task task, make(options));
  task.channels_last = task.channels_last && options.channels_last;
  return task;
}

}  // namespace ddp::tools::models
