// How far a run has come: what a checkpoint has to know of time.
//
//   Position position = {.epoch = 1, .sample = 640, .step = 30};
//   sampler.set_epoch(position.epoch);
//   loader = Loader::Create(train, sampler.Indices(position.sample), …);  // the very next example
#pragma once

#include <cstdint>

namespace ddp::trainer {

// The same on all ranks, and meaningful at any world size: it counts examples of all ranks.
struct Position {
  int64_t epoch = 0;   // complete epochs
  int64_t sample = 0;  // examples of the current epoch's order that are done, over all ranks
  int64_t step = 0;    // optimizer steps of the whole run
  int64_t seed = 0;    // of the order of examples
};

}  // namespace ddp::trainer
