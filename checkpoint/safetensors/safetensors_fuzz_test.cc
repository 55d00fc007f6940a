// Fuzz target: a file, as Format::Read takes it, and the values of a training state, which stand
// behind a checksum that no mutation would keep.
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "absl/base/log_severity.h"
#include "absl/log/globals.h"
#include "absl/strings/string_view.h"
#include "base/fuzz_testing.h"
#include "base/json.h"
#include "checkpoint/format.h"
#include "checkpoint/parts.h"
#include "checkpoint/tree_json.h"

namespace ddp::checkpoint {
namespace {

void ReadValues(absl::string_view text) {
  const absl::StatusOr<nlohmann::json> tree = ParseJson(text, {.depth = 303});
  if (!tree.ok()) return;
  const at::Tensor tensor = at::zeros({4, 4});
  const absl::StatusOr<c10::IValue> value =
      TreeFromJson(*tree, [&](const std::string&) { return c10::IValue(tensor); });
  if (!value.ok()) return;
  // What was read can be written.
  const auto written =
      TreeToJson(*value, [](const std::string&, const at::Tensor&) { return "x"; });
  if (!written.ok()) std::abort();
}

}  // namespace
}  // namespace ddp::checkpoint

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using ddp::checkpoint::CreateFormat;
  absl::SetMinLogLevel(absl::LogSeverityAtLeast::kFatal);
  const std::string path = ddp::FuzzedFile(data, size);
  const auto format = CreateFormat("safetensors").value();
  const absl::Status complete = format->CheckComplete(path);
  const auto read = format->Read(path);
  // What is complete may have damage in its tensors, and nothing else.
  if (complete.ok() && !read.ok() && !absl::IsDataLoss(read.status())) std::abort();
  (void)format->Read(path, {.parts = {{"model/w", ddp::checkpoint::FlatRange{1, 3}}}}).ok();
  ddp::checkpoint::ReadValues({reinterpret_cast<const char*>(data), size});
  return 0;
}
