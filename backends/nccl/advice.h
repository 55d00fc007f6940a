// What to check after an error of NCCL or CUDA, found by the text of the error.
//
//   "… Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10"
//   becomes, with WithAdvice,
//   "… both on CUDA device 10; check: two ranks use one GPU. Start at most …"
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ddp::backends::nccl {

// One or more sentences; empty if the text is not about NCCL or CUDA. Thread-safe: no state.
std::string Advice(absl::string_view error);

// Appends Advice, if any, to the message; code and payloads are kept. OK stays OK.
absl::Status WithAdvice(const absl::Status& status);

}  // namespace ddp::backends::nccl
