// For tests: the format "parts", written by all ranks: a folder with one file per rank. Supports
// values and tensors at the top level, and ranges of elements of tensors.
//
//   const auto manager = Manager::Create({.directory = folder, .format = "parts"}, ranks);
//
// Its files have format "pt", which must be linked.
#pragma once

#include <functional>
#include <string>

#include "absl/status/status.h"

namespace ddp::checkpoint {

// Thread-local hook: Read calls it with the path before it reads anything, and returns its error.
// Null: not called. Lets one rank fail where ranks are threads.
std::function<absl::Status(const std::string& path)>& BeforeReadOfThisThread();

}  // namespace ddp::checkpoint
