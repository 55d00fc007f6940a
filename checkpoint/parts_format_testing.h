// For tests: the format "parts", a folder with one file per rank, which all ranks write. It holds
// whole values and tensors at the top level, and of the latter also ranges of elements.
//
//   const auto manager = Manager::Create({.directory = folder, .format = "parts"}, ranks);
//
// Needs the format "pt" to be linked in, for its files.
#pragma once

#include <functional>
#include <string>

#include "absl/status/status.h"

namespace ddp::checkpoint {

// Called by this thread's Read with the path, before anything is read; an error is Read's result.
// Null: nothing is called. A test in which each rank is a thread thus lets one rank fail.
std::function<absl::Status(const std::string& path)>& BeforeReadOfThisThread();

}  // namespace ddp::checkpoint
