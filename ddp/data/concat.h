// Several data sets as one: their examples one after the other (PyTorch's ConcatDataset).
//
//   DDP_ASSIGN_OR_RETURN(auto train, ConcatDataset::Create({books, news}));
//   DDP_ASSIGN_OR_RETURN(options.sampler, MixtureSampler(   // order.h: a mixture by weights
//       {{.sampler = of_books, .weight = 3}, {.sampler = of_news, .weight = 1}}, {.seed = 1}));
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/cat.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "c10/util/Exception.h"
#include "ddp/data/batch.h"
#include "ddp/data/contents_digest.h"
#include "ddp/data/dataset.h"
#include "ddp/data/for_evaluation.h"

namespace ddp::data {

// It joins data sets of batches of type Batch, whose examples have one shape and dtype, and all
// have a target or none. It is evaluated as they are. Immutable; thread-safe if they are.
class ConcatDataset final : public RandomDatasetOf<Batch>, public EvaluatedOtherwise {
 public:
  using Parts = std::vector<std::shared_ptr<const AnyDataset>>;

  // InvalidArgument: there are no parts, or one is null.
  static absl::StatusOr<std::shared_ptr<const ConcatDataset>> Create(Parts parts) {
    std::vector<int64_t> ends;
    for (const auto& part : parts) {
      if (part == nullptr) {
        return absl::InvalidArgumentError(
            absl::StrCat("part ", ends.size(), " of a concatenated data set is null"));
      }
      ends.push_back((ends.empty() ? 0 : ends.back()) + part->size());
    }
    if (parts.empty()) {
      return absl::InvalidArgumentError("a concatenated data set has no parts");
    }
    Parts as_evaluated;
    for (const auto& part : parts) as_evaluated.emplace_back(part, &ForEvaluation(*part));
    std::shared_ptr<const ConcatDataset> evaluated;
    if (as_evaluated != parts) {
      evaluated.reset(new ConcatDataset(std::move(as_evaluated), ends, nullptr));
    }
    return std::shared_ptr<const ConcatDataset>(
        new ConcatDataset(std::move(parts), std::move(ends), std::move(evaluated)));
  }

  int64_t size() const override { return ends_.back(); }
  bool random_access() const override {
    return std::all_of(parts_.begin(), parts_.end(),
                       [](const auto& part) { return part->random_access(); });
  }
  // It combines those of the parts that have one.
  std::string Fingerprint() const override {
    ContentsDigest digest;
    bool has_any = false;
    for (const auto& part : parts_) {
      const std::string of_part = part->Fingerprint();
      has_any = has_any || !of_part.empty();
      digest.Add(part->size());
      digest.Add(of_part);
    }
    return has_any ? digest.Text() : "";
  }
  const AnyDataset& for_evaluation() const override {
    return evaluated_ == nullptr ? *this : *evaluated_;
  }

  Batch Get(absl::Span<const int64_t> indices, absl::Span<Random> random) const override {
    Batch batch;
    std::vector<at::Tensor> inputs(indices.size()), targets(indices.size());
    for (size_t part = 0; part < parts_.size(); ++part) {
      const int64_t begin = ends_[part] - parts_[part]->size();
      std::vector<int64_t> wanted, places;
      std::vector<Random> numbers;
      for (size_t i = 0; i < indices.size(); ++i) {
        if (indices[i] < begin || indices[i] >= ends_[part]) continue;
        wanted.push_back(indices[i] - begin);
        places.push_back(static_cast<int64_t>(i));
        numbers.push_back(random[i]);
      }
      if (wanted.empty()) continue;
      AnyBatch read = parts_[part]->GetAny(wanted, absl::MakeSpan(numbers));
      Batch& of_part = read.Get<Batch>();
      if (wanted.size() == indices.size()) {
        std::copy(numbers.begin(), numbers.end(), random.begin());
        return std::move(of_part);
      }
      for (size_t k = 0; k < places.size(); ++k) {
        const auto row = static_cast<int64_t>(k);
        random[places[k]] = numbers[k];
        inputs[places[k]] = of_part.input.narrow(0, row, 1);
        if (of_part.target.defined()) targets[places[k]] = of_part.target.narrow(0, row, 1);
      }
    }
    batch.input = at::cat(inputs);
    for (size_t i = 1; i < targets.size(); ++i) {
      const bool has_first = targets[0].defined();
      TORCH_CHECK(targets[i].defined() == has_first,
                  "the examples of a batch do not fit together: 'target' is ",
                  has_first ? "defined" : "undefined", " in example ", indices[0], ", but ",
                  has_first ? "undefined" : "defined", " in example ", indices[i],
                  ": all parts of a concatenated data set have targets, or none");
    }
    if (targets[0].defined()) batch.target = at::cat(targets);
    return batch;
  }

 private:
  ConcatDataset(Parts parts, std::vector<int64_t> ends,
                std::shared_ptr<const ConcatDataset> evaluated)
      : parts_(std::move(parts)), ends_(std::move(ends)), evaluated_(std::move(evaluated)) {}

  const Parts parts_;
  const std::vector<int64_t> ends_;                       // of the parts' indices
  const std::shared_ptr<const ConcatDataset> evaluated_;  // null: as it is
};

}  // namespace ddp::data
