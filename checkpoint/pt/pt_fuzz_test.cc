// Fuzz target of the reader of format pt. An input that starts as a zip archive is read as a file;
// any other is the data.pkl of one, with storages of whatever size it asks for.
//
// Mutations of most archives end at their CRC-32. Those of testdata/python_no_crc.pt, which has
// none, go on.
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/log_severity.h"
#include "absl/log/globals.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "base/fuzz_testing.h"
#include "base/status.h"
#include "checkpoint/format.h"
#include "checkpoint/pt/pickle_reader.h"

namespace ddp::checkpoint::pt {
namespace {

void ReadFile(const std::string& path) {
  static const std::unique_ptr<Format> format = CreateFormat("pt").value();
  static const bool quiet = [] {
    absl::SetMinLogLevel(absl::LogSeverityAtLeast::kError);
    return true;
  }();
  (void)quiet;
  std::vector<std::string> left_out;
  const absl::Status all = format->Read(path, {.left_out = &left_out}).status();
  // What all of it is made of can be read in parts, too.
  const absl::Status part = format->Read(path, {.parts = {{"model", Whole{}}}}).status();
  if (all.ok() && !part.ok() && !absl::IsInvalidArgument(part) && !absl::IsUnimplemented(part)) {
    std::abort();
  }
  format->Read(path, {.parts = {{"model/fc.weight", FlatRange{1, 3}}}}).IgnoreError();
  const absl::Status complete = format->CheckComplete(path);
  if (all.ok() && !complete.ok() && !absl::IsUnimplemented(complete)) std::abort();
}

void ReadPickleOf(absl::string_view pickle) {
  constexpr uint64_t kMost = 1 << 16;
  const LoadTensor load = [&](const TensorSpec& tensor, const Part&,
                              const std::string&) -> absl::StatusOr<c10::IValue> {
    if (tensor.storage_bytes > kMost) return absl::DataLossError("no such storage");
    return ViewOf(at::zeros({static_cast<int64_t>(tensor.storage_bytes)}, at::kByte).storage(),
                  tensor);
  };
  std::vector<std::string> left_out;
  const absl::Status strict =
      CatchStatus("", [&] { return ReadPickle(pickle, {}, load).status(); });
  const absl::Status lenient =
      CatchStatus("", [&] { return ReadPickle(pickle, {.left_out = &left_out}, load).status(); });
  // Only what is said to be left out makes a difference.
  if (strict.ok() && (!lenient.ok() || !left_out.empty())) std::abort();
  if (absl::IsInternal(strict) || absl::IsInternal(lenient)) std::abort();
}

}  // namespace
}  // namespace ddp::checkpoint::pt

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view input(reinterpret_cast<const char*>(data), size);
  if (absl::StartsWith(input, "PK")) {
    ddp::checkpoint::pt::ReadFile(ddp::FuzzedFile(data, size));
  } else {
    ddp::checkpoint::pt::ReadPickleOf(input);
  }
  return 0;
}
