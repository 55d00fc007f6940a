// Models by name, for `--model=NAME` of //tools:train.
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

// InvalidArgument if the model does not support that input shape. Parameters are initialised with
// torch's default generator: seed it first.
using ModelFactory = absl::StatusOr<trainer::Task> (*)(const ModelOptions& options);

struct ModelTag {
  static constexpr absl::string_view kWhat = "model";
};
using ModelRegistry = Registry<ModelFactory, ModelTag>;

struct ModelOptions {
  std::string name = "mlp";
  // Whether models that benefit from it run in channels-last order (see trainer::Task).
  bool channels_last = true;

  // The program sets these members, from the data set.
  std::vector<int64_t> input_shape = {};  // of one example: [channels, height, width]
  int64_t num_classes = 0;
};

constexpr auto OptionsOf(const ModelOptions&) {
  return Options(
      Option("name", &ModelOptions::name, "model to train").OneOfThese(&ModelRegistry::Names),
      Option("channels_last", &ModelOptions::channels_last,
             "channels-last memory format for convolutional models on the CPU"));
}

// Makes the model options.name. NotFound, listing the linked ones, for an unknown name; errors of
// the model's factory.
inline absl::StatusOr<trainer::Task> Make(const ModelOptions& options) {
  DDP_ASSIGN_OR_RETURN(const ModelFactory make, ModelRegistry::Find(options.name));
  DDP_ASSIGN_OR_RETURN(trainer::Task task, make(options));
  task.channels_last = task.channels_last && options.channels_last;
  return task;
}

}  // namespace ddp::tools::models
