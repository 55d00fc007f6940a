// Fuzz target: an item of a `.distcp` file, a tensor or another value. The corpus has items of
// testdata/two_ranks, as bytes from "PK" on to the end of their zip directory; mutations of most
// end at their CRC-32, those of *_no_crc.item, which have zeros for these, go on.
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/fuzz_testing.h"
#include "base/status.h"
#include "checkpoint/dcp/item_reader.h"
#include "checkpoint/parts.h"

namespace ddp::checkpoint::dcp {
namespace {

void ReadItem(const std::string& path, size_t size) {
  const size_t slash = path.rfind('/');
  const absl::StatusOr<ItemReader> item =
      ItemReader::Open(path.substr(0, slash), {path.substr(slash + 1), 0, size});
  if (!item.ok()) return;
  std::vector<std::string> left_out;
  const absl::Status lenient =
      CatchStatus("", [&] { return item->Value("x", &left_out).status(); });
  const absl::StatusOr<std::optional<c10::IValue>> value =
      CatchStatus("", [&] { return item->Value("x", nullptr); });
  const absl::Status complete = CatchStatus("", [&] { return item->CheckValue(); });
  if (value.ok() && !lenient.ok()) std::abort();
  if (value.ok() && !complete.ok() && !absl::IsUnimplemented(complete)) std::abort();
  if (absl::IsInternal(value.status())) std::abort();
  if (!value.ok() || !value->has_value() || !(*value)->isTensor()) return;
  const at::Tensor& tensor = (*value)->toTensor();
  // Folder::CheckFiles lets no tensor be larger than its item.
  if (tensor.layout() != at::kStrided || tensor.numel() > static_cast<int64_t>(size)) return;
  const std::vector<int64_t> shape = tensor.sizes().vec();
  std::vector<Part> parts = {Whole{}, Box{std::vector<int64_t>(shape.size()), shape}};
  if (tensor.numel() > 2) parts.emplace_back(FlatRange{1, 3});
  for (const Part& part : parts) {
    CatchStatus("", [&] {
      return item->Tensor(tensor.scalar_type(), shape, part).status();
    }).IgnoreError();
  }
}

}  // namespace
}  // namespace ddp::checkpoint::dcp

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ddp::checkpoint::dcp::ReadItem(ddp::FuzzedFile(data, size), size);
  return 0;
}
