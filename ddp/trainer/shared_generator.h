// Refuses data sets whose examples depend on what else draws random numbers. Private to this
// folder.
#pragma once

#include "absl/status/status.h"
#include "ddp/data/dataset.h"
#include "ddp/data/sampler.h"

namespace ddp::trainer {

// Reads the first example of this rank's share alone. InvalidArgument, with the data set's type, if
// torch's global generator has moved, whose numbers would depend on the order in which workers and
// training draw. What else may be wrong with the example, training will say. Call it on the main
// rank, while no other thread of the process draws from that generator. Not collective.
absl::Status RefuseSharedGenerator(const data::AnyDataset& dataset,
                                   const data::DistributedSampler& sampler);

}  // namespace ddp::trainer
