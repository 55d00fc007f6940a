// Data sets that do something to examples for training alone, as random transforms.
//
//   class Shaken : public data::DatasetOf<Batch>, public data::EvaluatedOtherwise { … };
//   const data::AnyDataset& plain = data::ForEvaluation(shaken);
#pragma once

#include "ddp/data/dataset.h"

namespace ddp::data {

// A second base class of such a data set. Thread-safe.
class EvaluatedOtherwise {
 public:
  virtual ~EvaluatedOtherwise() = default;

  // The same examples under the same indices, as they are evaluated. Lives as long as this.
  virtual const AnyDataset& for_evaluation() const = 0;
};

// `dataset` as it is evaluated; itself, if it does not say.
inline const AnyDataset& ForEvaluation(const AnyDataset& dataset) {
  const auto* otherwise = dynamic_cast<const EvaluatedOtherwise*>(&dataset);
  return otherwise != nullptr ? otherwise->for_evaluation() : dataset;
}

}  // namespace ddp::data
