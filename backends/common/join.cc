#include "backends/common/join.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"

namespace ddp::backends {

absl::Status WaitForAllRanks(c10d::Store& store, int rank, int size, absl::Duration timeout) {
  std::vector<std::string> keys;
  for (int peer = 0; peer < size; ++peer) keys.push_back(absl::StrCat("joined/", peer));
  const absl::Status waited = CatchStatus("waiting for the other ranks to create the group", [&] {
    store.set(keys[rank], std::vector<uint8_t>{1});
    store.wait(keys, absl::ToChronoMilliseconds(timeout));
  });
  if (!absl::IsDeadlineExceeded(waited)) return waited;
  std::vector<int> missing;
  const absl::Status looked = CatchStatus("", [&] {
    for (int peer = 0; peer < size; ++peer) {
      if (!store.check({keys[peer]})) missing.push_back(peer);
    }
  });
  if (!looked.ok() || missing.empty()) return waited;
  return absl::DeadlineExceededError(
      absl::StrCat("Timed out after ", absl::FormatDuration(timeout), ": rank ", rank,
                   " waited for the other ranks to create a group of ", size, "; never came: rank ",
                   absl::StrJoin(missing, ", ")));
}

}  // namespace ddp::backends
