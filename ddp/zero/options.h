// Options of the sharded optimizer: zero.… of a program.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/options.h"
#include "c10/core/ScalarType.h"

namespace ddp::zero {

struct ZeroOptions {
  // What is sharded. 0: nothing. 1: the optimizer's state. 2: also the gradients.
  int64_t stage = 0;
  // "flat": equal shares of elements. "tensor": whole tensors.
  std::string partition = "flat";
  // fp16 and bf16 parameters have fp32 master copies. The optimizer updates the copies; the
  // parameters are their rounded values.
  bool master_weights = true;
  // step() does not wait for the all-gather of updated parameters. The next forward of a
  // DistributedDataParallel over the same group waits for it, or WaitForParameters.
  bool overlap_gather = false;

  // The following apply to stage 2, with the same meaning as in DataParallelOptions. A program that
  // has both copies them from there. Maximum size of a bucket of gradients in MiB; two are in
  // memory.
  double bucket_cap_mb = 25;
  // Parameters may get no gradient; on a rank, even all of them. Such a rank takes part at the end
  // of a backward from what the wrapped model has returned, in a type of ddp/tree/tree.h and
  // whatever the wrapper's own option is; without a wrapper, in step(), which is right for one
  // backward per step. Costs one small all-reduce per backward.
  bool find_unused_parameters = false;
  // Stage 2: dtype in which gradients are sent, fp16 or bf16, as with the hooks fp16_compress and
  // bf16_compress (ddp/hooks/compress.h). The reduced shard has the parameters' dtype. Unset:
  // gradients are sent in the parameters' dtype.
  std::optional<c10::ScalarType> gradient_dtype = std::nullopt;
};

constexpr auto OptionsOf(const ZeroOptions&) {
  return Options(
      Option("stage", &ZeroOptions::stage,
             "what is sharded: 0 nothing, 1 the optimizer's state, 2 also gradients")
          .AtLeast(0)
          .AtMost(2),
      Option("partition", &ZeroOptions::partition,
             "what a rank owns: flat, equal shares of elements; tensor, whole tensors")
          .Alias("partition")
          .OneOf("flat", "tensor"),
      Option("master_weights", &ZeroOptions::master_weights,
             "update fp16 and bf16 parameters in fp32"),
      Option("overlap_gather", &ZeroOptions::overlap_gather,
             "step() returns before updated parameters are gathered; the next forward waits"));
}

}  // namespace ddp::zero
