#include "ddp/trainer/shared_generator.h"

#include <algorithm>
#include <cstdint>
#include <functional>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "checkpoint/rng_state.h"
#include "ddp/data/random.h"

namespace ddp::trainer {

namespace {

absl::Status Refuse(const data::AnyDataset& dataset, const std::function<data::Share()>& make) {
  const at::Tensor before = checkpoint::RngState();
  CatchStatus("", [&] {
    const data::Share share = make();
    const auto read = [&](int64_t i) {
      const int64_t index = share.Index(i);
      if (index < 0 || index >= dataset.size()) return;
      data::Random random(share.seed, share.epoch, share.Position(i));
      CatchStatus("", [&] { dataset.GetAny({&index, 1}, {&random, 1}); }).IgnoreError();
    };
    read(0);
    // Some data sets draw for a part of their examples only. An endless share has no middle.
    const int64_t middle = std::min(share.size, dataset.size()) / 2;
    if (middle > 0 && dataset.random_access()) read(middle);
  }).IgnoreError();
  if (checkpoint::RngState().equal(before)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "data set ", dataset.dataset_name(),
      " draws from torch's global generator in Get: its workers and the training would share it, "
      "and no two runs would be equal; draw from the Random that Get receives (RandomDatasetOf, "
      "ddp/data/dataset.h)"));
}

}  // namespace

absl::Status RefuseSharedGenerator(const data::AnyDataset& dataset,
                                   const data::DistributedSampler& sampler) {
  return Refuse(dataset, [&] { return sampler.ShareFrom(0); });
}

absl::Status RefuseSharedGenerator(const data::AnyDataset& dataset, int64_t seed) {
  if (dataset.size() == 0) return absl::OkStatus();
  return Refuse(dataset, [&] {
    return data::EvaluationSampler::Create(dataset.size(), {.seed = seed}).value().AsShare();
  });
}

}  // namespace ddp::trainer
