// Fuzz target: the index of a checkpoint, and all that is derived from it before files are read.
#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/fuzz_testing.h"
#include "checkpoint/dcp/metadata.h"
#include "checkpoint/dcp/metadata_writer.h"
#include "checkpoint/dcp/tree.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  namespace dcp = ddp::checkpoint::dcp;
  const absl::string_view pickle(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<dcp::Metadata> metadata = dcp::ParseMetadata(pickle);
  if (!metadata.ok()) return 0;
  if (!dcp::TreeOf(metadata->entries).ok()) return 0;
  // What is read is sound: it can be written, and is then read again.
  if (!dcp::ParseMetadata(dcp::WriteMetadata(*metadata)).ok()) __builtin_trap();
  return 0;
}
