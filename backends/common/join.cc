#include "backends/common/join.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"

namespace ddp::backends {
namespace {

std::vector<std::string> Keys(int size) {
  std::vector<std::string> keys;
  for (int peer = 0; peer < size; ++peer) keys.push_back(absl::StrCat("joined/", peer));
  return keys;
}

// `mine`: the value of this rank's key.
absl::Status SetAndWait(c10d::Store& store, const std::vector<std::string>& keys, int rank,
                        const std::string& mine, absl::Duration timeout) {
  const int size = static_cast<int>(keys.size());
  const absl::Status waited = CatchStatus("waiting for the other ranks to create the group", [&] {
    store.set(keys[rank], std::vector<uint8_t>(mine.begin(), mine.end()));
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

}  // namespace

absl::Status WaitForAllRanks(c10d::Store& store, int rank, int size, absl::Duration timeout) {
  return SetAndWait(store, Keys(size), rank, "1", timeout);
}

absl::StatusOr<std::vector<std::string>> GatherFromAllRanks(c10d::Store& store, int rank, int size,
                                                            const std::string& mine,
                                                            absl::Duration timeout) {
  const std::vector<std::string> keys = Keys(size);
  DDP_RETURN_IF_ERROR(SetAndWait(store, keys, rank, mine, timeout));
  std::vector<std::string> texts;
  DDP_RETURN_IF_ERROR(CatchStatus("reading what the other ranks have told", [&] {
    for (const std::vector<uint8_t>& value : store.multiGet(keys)) {
      texts.emplace_back(value.begin(), value.end());
    }
  }));
  return texts;
}

}  // namespace ddp::backends
