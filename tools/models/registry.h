// Models by name, for `--model=NAME` of //tools:train.
//
//   DDP_ASSIGN_OR_RETURN(trainer::Task task, Make({.name = "cnn",
//                                                  .input_shape = {1, 28, 28},
//                                                  .num_classes = 10}));
//   const Registration<ModelRegistry> kMine("mine", ModelEntry{.create = &MakeMine});
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/implementation_options.h"
#include "base/option_error.h"
#include "base/options.h"
#include "base/registry.h"
#include "base/status.h"
#include "ddp/trainer/callback.h"
#include "ddp/trainer/task.h"

namespace ddp::tools::models {

struct ModelOptions;

// InvalidArgument if the model does not support that input shape. Parameters are initialised with
// torch's default generator: seed it first.
using ModelFactory = absl::StatusOr<trainer::Task> (*)(const ModelOptions& options);

struct ModelTag {
  static constexpr absl::string_view kWhat = "model";
};
struct ModelEntry {
  ModelFactory create = nullptr;
  // &AnyOptions::Of<…> for the model's own options, "model.NAME.…"; null: it has none.
  AnyOptions (*options)() = nullptr;
  // Returns the longest sequence of tokens that the model takes. Null: it takes no tokens.
  int64_t (*context)(const ModelOptions& options) = nullptr;
  // Values, by path, of options of //tools:train that the user has not set: what the model is
  // trained with best. Null: none.
  std::vector<std::pair<std::string, std::string>> (*defaults)() = nullptr;
  // Callbacks of a run that trains the model. Null: none.
  std::vector<std::shared_ptr<trainer::Callback>> (*callbacks)(const ModelOptions& options) =
      nullptr;
};
using ModelRegistry = Registry<ModelEntry, ModelTag>;

struct ModelOptions {
  std::string name = "mlp";
  // These are options of the models themselves.
  ImplementationOptions implementations = ImplementationOptions::From<ModelRegistry>();
  // Whether models that benefit from it run in channels-last order (see trainer::Task).
  bool channels_last = true;

  // The program sets these members, from the data set.
  std::vector<int64_t> input_shape = {};  // of one example: [channels, height, width], or [tokens]
  int64_t num_classes = 0;                // or the number of different tokens
  std::string token = "";                 // what a token is (datasets::Splits); empty: no tokens
};

constexpr auto OptionsOf(const ModelOptions&) {
  return Options(
      Option("name", &ModelOptions::name, "model to train").OneOfThese(&ModelRegistry::Names),
      Option("channels_last", &ModelOptions::channels_last,
             "channels-last memory format for convolutional models on the CPU"),
      Inline(&ModelOptions::implementations));
}

// The longest sequence of tokens that the model options.name takes; 0: it takes none, or there is
// no such model.
inline int64_t ContextOf(const ModelOptions& options) {
  const absl::StatusOr<ModelEntry> entry = ModelRegistry::Find(options.name);
  return entry.ok() && entry->context != nullptr ? entry->context(options) : 0;
}

// ModelEntry::defaults and callbacks of the model options.name.
inline std::vector<std::pair<std::string, std::string>> DefaultsOf(const ModelOptions& options) {
  const absl::StatusOr<ModelEntry> entry = ModelRegistry::Find(options.name);
  if (!entry.ok() || entry->defaults == nullptr) return {};
  return entry->defaults();
}
inline std::vector<std::shared_ptr<trainer::Callback>> CallbacksOf(const ModelOptions& options) {
  const absl::StatusOr<ModelEntry> entry = ModelRegistry::Find(options.name);
  if (!entry.ok() || entry->callbacks == nullptr) return {};
  return entry->callbacks(options);
}

// Makes the model options.name. NotFound, listing the linked ones, for an unknown name;
// InvalidArgument for a model of tokens and other data, or the reverse; errors of the model's
// factory.
inline absl::StatusOr<trainer::Task> Make(const ModelOptions& options) {
  DDP_ASSIGN_OR_RETURN(const ModelEntry entry, ModelRegistry::Find(options.name));
  if ((entry.context != nullptr) != !options.token.empty()) {
    return OptionError("model.name", options.name,
                       absl::StrCat("takes ", entry.context != nullptr ? "" : "no ",
                                    "sequences of tokens, and the data set has ",
                                    options.token.empty() ? "none" : "nothing else", ": choose ",
                                    options.token.empty() ? "dataset=text, or another model"
                                                          : "model=gpt, or another data set"));
  }
  DDP_ASSIGN_OR_RETURN(trainer::Task task, entry.create(options));
  task.channels_last = task.channels_last && options.channels_last;
  return task;
}

}  // namespace ddp::tools::models
