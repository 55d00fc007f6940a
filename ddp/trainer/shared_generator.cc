#include "ddp/trainer/shared_generator.h"

#include <cstdint>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "checkpoint/rng_state.h"
#include "ddp/data/random.h"

namespace ddp::trainer {

absl::Status RefuseSharedGenerator(const data::AnyDataset& dataset,
                                   const data::DistributedSampler& sampler) {
  const at::Tensor before = checkpoint::RngState();
  CatchStatus("", [&] {
    const data::Share share = sampler.ShareFrom(0);
    const int64_t index = share.Index(0);
    if (index < 0 || index >= dataset.size()) return;
    data::Random random(share.seed, share.epoch, share.Position(0));
    dataset.GetAny({&index, 1}, {&random, 1});
  }).IgnoreError();
  if (checkpoint::RngState().equal(before)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "data set ", dataset.dataset_name(),
      " draws from torch's global generator in Get: its workers and the training would share it, "
      "and no two runs would be equal; draw from the Random that Get receives (RandomDatasetOf, "
      "ddp/data/dataset.h)"));
}

}  // namespace ddp::trainer
