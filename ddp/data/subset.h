// Some examples of a data set, as a data set.
//
//   const data::Subset first(train, {0, 1, 2});
//   // As torch.utils.data.random_split with a generator of this seed:
//   const auto [rest, held_out] = data::RandomSplit(train, /*held_out=*/1000, /*seed=*/1);
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "ddp/data/contents_digest.h"
#include "ddp/data/dataset.h"
#include "ddp/data/for_evaluation.h"
#include "ddp/data/random.h"
#include "ddp/data/sampler.h"

namespace ddp::data {

// Thread-safe. `dataset` outlives it. Its examples are numbered anew, from 0: errors about them
// name these numbers. It is evaluated as `dataset` is.
class Subset final : public AnyDataset, public EvaluatedOtherwise {
 public:
  // `indices`: examples of `dataset`, in any order.
  Subset(const AnyDataset& dataset, std::vector<int64_t> indices)
      : Subset(AsItIs(), dataset,
               std::make_shared<const std::vector<int64_t>>(std::move(indices))) {
    const AnyDataset& evaluated = ForEvaluation(dataset);
    if (&evaluated != &dataset) evaluated_.reset(new Subset(AsItIs(), evaluated, indices_));
  }

  int64_t size() const override { return static_cast<int64_t>(indices_->size()); }
  AnyBatch GetAny(absl::Span<const int64_t> indices, absl::Span<Random> random) const override {
    std::vector<int64_t> of_all;
    of_all.reserve(indices.size());
    for (const int64_t index : indices) of_all.push_back(indices_->at(static_cast<size_t>(index)));
    return dataset_.GetAny(of_all, random);
  }
  std::string dataset_name() const override { return dataset_.dataset_name(); }
  bool random_access() const override { return dataset_.random_access(); }
  std::string Fingerprint() const override {
    const std::string of_all = dataset_.Fingerprint();
    if (of_all.empty()) return "";
    ContentsDigest digest;
    digest.Add(of_all);
    digest.AddSamples(absl::MakeConstSpan(*indices_));
    return digest.Text();
  }
  const AnyDataset& for_evaluation() const override {
    return evaluated_ == nullptr ? *this : *evaluated_;
  }

  // Each example here has this number in the whole data set.
  const std::vector<int64_t>& indices() const { return *indices_; }

 private:
  using Indices = std::shared_ptr<const std::vector<int64_t>>;
  struct AsItIs {};

  Subset(AsItIs, const AnyDataset& dataset, Indices indices)
      : dataset_(dataset), indices_(std::move(indices)) {}

  const AnyDataset& dataset_;
  const Indices indices_;
  std::shared_ptr<const Subset> evaluated_;  // null: as it is
};

// All examples but `held_out` of them, and those; 0 <= held_out <= dataset.size(). The same
// examples in the same order as Python's random_split(dataset, [n - held_out, held_out],
// torch.Generator().manual_seed(seed)).
inline std::pair<Subset, Subset> RandomSplit(const AnyDataset& dataset, int64_t held_out,
                                             uint64_t seed) {
  std::vector<int64_t> rest = RandomPermutation(dataset.size(), seed);
  std::vector<int64_t> last(rest.end() - held_out, rest.end());
  rest.resize(rest.size() - static_cast<size_t>(held_out));
  return {Subset(dataset, std::move(rest)), Subset(dataset, std::move(last))};
}

}  // namespace ddp::data
