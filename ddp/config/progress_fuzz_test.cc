// Fuzz target: the files of a job from which a report reads its progress, separated by zero bytes:
// log, metrics, attempts and configuration.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "base/fuzz_testing.h"
#include "ddp/config/progress.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  absl::string_view rest(reinterpret_cast<const char*>(data), size);
  std::array<absl::string_view, 4> files;
  for (absl::string_view& file : files) {
    file = rest.substr(0, rest.find('\0'));
    rest.remove_prefix(std::min(rest.size(), file.size() + 1));
  }
  const ddp::config::JobProgress progress = ddp::config::ProgressIn(
      {.log = files[0], .metrics = files[1], .attempts = files[2], .config = files[3]});
  if (!progress.epoch.empty() && !absl::StrContains(progress.epoch, '/')) std::abort();
  return 0;
}
