// The precision of forward: TrainerOptions::precision.
//
//   const Task task = InPrecision(given, "bf16");  // forward runs under autocast
#pragma once

#include <string>
#include <utility>

#include "ATen/core/Tensor.h"
#include "ddp/amp/autocast.h"
#include "ddp/trainer/task.h"

namespace ddp::trainer {

// The task with a forward under autocast, whose floating-point result is float32, for the loss.
// `precision`: "fp32" (unchanged), "bf16" or "fp16".
inline Task InPrecision(Task task, const std::string& precision) {
  if (precision != "bf16" && precision != "fp16") return task;
  const at::ScalarType dtype = precision == "bf16" ? at::kBFloat16 : at::kHalf;
  task.forward = [forward = std::move(task.forward), dtype](const at::Tensor& input) {
    const Autocast autocast(input.device().type(), dtype);
    const at::Tensor output = forward(input);
    return at::isReducedFloatingType(output.scalar_type()) ? output.to(at::kFloat) : output;
  };
  return task;
}

}  // namespace ddp::trainer
