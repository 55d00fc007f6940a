// Refuses data sets whose examples depend on what else draws random numbers. Private to this
// folder.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "ddp/data/dataset.h"
#include "ddp/data/sampler.h"

namespace ddp::trainer {

// Reads two examples of this rank's share, each alone: the first one and one in the middle, which
// is left out of a stream that cannot seek. InvalidArgument, with the data set's type, if torch's
// global generator has moved, whose numbers would depend on the order in which workers and training
// draw. What else may be wrong with the examples, training will say. Call it on the main rank,
// while no other thread of the process draws from that generator. Not collective.
absl::Status RefuseSharedGenerator(const data::AnyDataset& dataset,
                                   const data::DistributedSampler& sampler);

// The same of what is evaluated, with the run's seed. OK if there are no examples.
absl::Status RefuseSharedGenerator(const data::AnyDataset& dataset, int64_t seed);

}  // namespace ddp::trainer
