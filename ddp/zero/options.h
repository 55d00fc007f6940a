// Options of the sharded optimizer: zero.… of a program.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/options.h"
#include "c10/core/ScalarType.h"

namespace ddp::zero {

struct ZeroOptions {
  // What ranks hold only a part of. 0: nothing. 1: the optimizer's state. 2: the gradients as well.
  int64_t stage = 0;
  // "flat": equal shares of elements. "tensor": whole tensors.
  std::string partition = "flat";
  // Parameters of fp16 and bf16 are updated in fp32, of which they are the rounding.
  bool master_weights = true;
  // Updated parameters are gathered until the next forward of a DistributedDataParallel over the
  // same group, or WaitForParameters; not until step returns.
  bool overlap_gather = false;

  // Stage 2's, with the meaning that they have in DataParallelOptions; a program with both sets
  // them from there. Maximum size of a bucket of gradients in MiB; two are in memory.
  double bucket_cap_mb = 25;
  // Parameters may get no gradient. Costs one small all-reduce per backward.
  bool find_unused_parameters = false;
  // Stage 2: fp16 or bf16, in which gradients are sent, as by the communication hooks of these
  // names (ddp/hooks/compress.h); the rank's part is in the parameters' dtype. Unset: in theirs.
  std::optional<c10::ScalarType> gradient_dtype = std::nullopt;
};

constexpr auto OptionsOf(const ZeroOptions&) {
  return Options(
      Option("stage", &ZeroOptions::stage,
             "ranks hold a part of 0: nothing, 1: the optimizer's state, 2: gradients as well")
          .AtLeast(0)
          .AtMost(2),
      Option("partition", &ZeroOptions::partition, "equal shares of elements, or whole tensors")
          .Alias("partition")
          .OneOf("flat", "tensor"),
      Option("master_weights", &ZeroOptions::master_weights,
             "update fp16 and bf16 parameters in fp32"),
      Option("overlap_gather", &ZeroOptions::overlap_gather,
             "gather updated parameters until the next forward"));
}

}  // namespace ddp::zero
