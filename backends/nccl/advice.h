// What to check when NCCL or CUDA has failed, told from the text of the error.
//
//   "… Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10"
//   becomes, with WithAdvice,
//   "… both on CUDA device 10; check: two ranks use one GPU. Start at most …"
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ddp::backends::nccl {

// One or more sentences; empty where the text speaks of neither NCCL nor CUDA. Pure.
std::string Advice(absl::string_view error);

// Adds Advice, if any, to the message; code and payloads stay. OK stays OK.
absl::Status WithAdvice(const absl::Status& status);

}  // namespace ddp::backends::nccl
