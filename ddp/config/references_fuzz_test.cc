// Fuzz target: references to the environment and to other options, ${oc.env:NAME} and ${OPTION}.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "base/fuzz_testing.h"
#include "ddp/config/references.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const auto replaced = ddp::config::ReplaceReferences(
      text,
      [](absl::string_view name) -> absl::StatusOr<std::string> { return std::string(name); });
  // Text without a reference stays as it is.
  if (!absl::StrContains(text, "${") && (!replaced.ok() || *replaced != text)) std::abort();
  return 0;
}
