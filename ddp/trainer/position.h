// The position of a run in its training data, as saved in checkpoints.
//
//   Position position = {.epoch = 1, .sample = 640, .step = 30};
//   sampler.set_epoch(position.epoch);
//   loader->Begin(sampler.ShareFrom(position.sample));  // the next examples
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ddp::trainer {

// The same on all ranks and independent of the world size. A plain value.
struct Position {
  int64_t epoch = 0;            // complete epochs
  int64_t sample = 0;           // examples of the current epoch that are done, over all ranks
  int64_t step = 0;             // optimizer steps of the whole run
  int64_t seed = 0;             // determines the order of examples
  int64_t dataset_size = 0;     // so does the number of examples in all; 0: not known
  int64_t validation_size = 0;  // examples that are held out of the training data, by the seed
  int64_t validated_step = 0;   // after which the validation data were last evaluated; 0: never
  // Tells the order of the epoch's examples from others, within an epoch; 0: not known.
  int64_t order = 0;
  // The training set's data::AnyDataset::Fingerprint, which is empty for one that has none; saved
  // within an epoch. nullopt: not known, as in checkpoints of earlier versions.
  std::optional<std::string> data_fingerprint = std::nullopt;
  // The approximate count of a step's loss, by phase of the task, by which sums are scaled before
  // backward so that gradients stay in the range of means. It is the greatest so far, and in the
  // run's first step what is expected of it; missing: not known yet, or not needed.
  std::vector<double> loss_counts = {};
};

}  // namespace ddp::trainer
