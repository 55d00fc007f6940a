#include "tools/train_options.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/option_error.h"
#include "base/option_list.h"
#include "base/status.h"
#include "launchers/slurm/requeue.h"
#include "tools/datasets/augmented.h"

namespace ddp::tools {
namespace {

// Options of a model or data set that is not the one that is chosen: "model.gpt.depth" of a cnn.
absl::Status CheckUnused(const TrainOptions& given) {
  TrainOptions options = given, defaults;
  const OptionList list = ListOptions(options), unset = ListOptions(defaults);
  const std::vector<std::tuple<std::string, std::string, std::vector<std::string>>> groups = {
      {"model", options.model.name, models::ModelRegistry::Names()},
      {"dataset", options.dataset.name, datasets::DatasetRegistry::Names()}};
  for (size_t i = 0; i < list.options().size(); ++i) {
    const OptionRef& option = list.options()[i];
    for (const auto& [group, chosen, names] : groups) {
      absl::string_view path = option.path;
      if (!absl::ConsumePrefix(&path, group + ".")) continue;
      const std::string name(path.substr(0, path.find('.')));
      const bool is_of_other = path.size() > name.size() && name != chosen &&
                               std::find(names.begin(), names.end(), name) != names.end();
      if (!is_of_other || option.get() == unset.options()[i].get()) continue;
      return OptionError(option.path, option.get(),
                         absl::StrCat("has no effect: it is of ", group, "=", name, ", and ", group,
                                      "=", chosen, " is chosen"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Validate(const TrainOptions& options) {
  DDP_RETURN_IF_ERROR(CheckUnused(options));
  DDP_RETURN_IF_ERROR(datasets::ValidateAugment(options.dataset));
  if (!options.trainer.eval_only) {
    DDP_RETURN_IF_ERROR(InGroup(
        "launcher", launchers::slurm::CheckRequeue(
                        options.session.launcher,
                        {.folder_option = "checkpoint.dir",
                         .has_folder = !options.trainer.checkpoint.manager.directory.empty(),
                         .saves_option = "checkpoint.every",
                         .saves = trainer::AsksForSaves(options.trainer.checkpoint),
                         .stop_signals = options.trainer.stop_signals})));
  }
  return trainer::Validate(options.trainer);
}

std::vector<std::pair<std::string, std::string>> Implied(const TrainOptions& options) {
  std::vector<std::pair<std::string, std::string>> values = models::DefaultsOf(options.model);
  // Who chooses a job by test data cannot test it any more.
  if (options.trainer.validation_size > 0) {
    values.emplace_back("sweep_metric", "val/accuracy:max");
  }
  return values;
}

}  // namespace ddp::tools
