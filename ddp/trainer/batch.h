// Moves batches to the device.
//
//   const data::Batch there = ToDevice(batch, session.device(), /*channels_last=*/true);
#pragma once

#include "c10/core/Device.h"
#include "c10/util/Exception.h"
#include "ddp/data/dataset.h"
#include "ddp/trainer/channels_last.h"

namespace ddp::trainer {

// The batch on `device`; with channels_last, a 4-dimensional input in channels-last order.
inline data::Batch ToDevice(const data::Batch& batch, c10::Device device, bool channels_last) {
  TORCH_CHECK(batch.input.defined(), "the data set has given a batch without an input");
  data::Batch there = {batch.input.to(device),
                       batch.target.defined() ? batch.target.to(device) : batch.target};
  if (channels_last) there.input = ChannelsLast(there.input);
  return there;
}

}  // namespace ddp::trainer
