// All options of //tools:train; flags, --help and the table in logs are generated from them. Names:
// docs/options.md.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/options.h"
#include "ddp/session/options.h"
#include "ddp/trainer/options.h"
#include "tools/datasets/registry.h"
#include "tools/models/registry.h"

namespace ddp::tools {

// Some defaults differ from those of the libraries.
struct TrainOptions {
  models::ModelOptions model = {.name = "cnn"};
  datasets::DatasetOptions dataset = {.name = "fashion_mnist"};
  trainer::TrainerOptions trainer = {
      .epochs = 4, .optimizer = {.lr = 0.05, .weight_decay = 5e-4}, .schedule = {.name = "cosine"}};
  session::SessionOptions session = {.launcher = {.default_nproc_per_node = 2}};
  std::string bench_json = "";
};

constexpr auto OptionsOf(const TrainOptions&) {
  return Options(Nested("model", &TrainOptions::model, "the model"),
                 Nested("dataset", &TrainOptions::dataset, "the data set"),
                 Inline(&TrainOptions::trainer), Inline(&TrainOptions::session),
                 Option("bench_json", &TrainOptions::bench_json,
                        "write measurements of the steps to this file; empty: none")
                     .Incidental()
                     .OnAllRanksOrNone());
}

// Checks everything that can be checked without ranks, data and disk, also that no option is of a
// model or data set that is not used. OptionError.
absl::Status Validate(const TrainOptions& options);

// Values, by path, of options that nobody has given: ProgramSpec::implied.
std::vector<std::pair<std::string, std::string>> Implied(const TrainOptions& options);

}  // namespace ddp::tools
