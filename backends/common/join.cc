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

// Appends the indices of those in [begin, end).
void FindMissing(c10d::Store& store, const std::vector<std::string>& keys, int begin, int end,
                 std::vector<int>& missing) {
  if (begin == end || store.check({keys.begin() + begin, keys.begin() + end})) return;
  if (end - begin == 1) {
    missing.push_back(begin);
    return;
  }
  const int middle = begin + (end - begin) / 2;
  FindMissing(store, keys, begin, middle, missing);
  FindMissing(store, keys, middle, end, missing);
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
  const absl::Status looked = CatchStatus("", [&] { missing = MissingKeys(store, keys); });
  if (!looked.ok() || missing.empty()) return waited;
  return absl::DeadlineExceededError(
      absl::StrCat("Timed out after ", absl::FormatDuration(timeout), ": rank ", rank,
                   " waited for the other ranks to create a group of ", size, "; never came: rank ",
                   absl::StrJoin(missing, ", ")));
}

}  // namespace

std::vector<int> MissingKeys(c10d::Store& store, const std::vector<std::string>& keys) {
  std::vector<int> missing;
  FindMissing(store, keys, 0, static_cast<int>(keys.size()), missing);
  return missing;
}

absl::Status WaitForAllRanks(c10d::Store& store, int rank, int size, absl::Duration timeout) {
  return SetAndWait(store, Keys(size), rank, "1", timeout);
}

absl::StatusOr<std::vector<std::string>> GatherFromAllRanks(c10d::Store& store, int rank, int size,
                                                            const std::string& mine,
                                                            absl::Duration timeout) {
  const std::vector<std::string> keys = Keys(size);
  DDP_RETURN_IF_ERROR(SetAndWait(store, keys, rank, mine, timeout));
  std::vector<std::string> texts;
  DDP_RETURN_IF_ERROR(CatchStatus("reading the other ranks' values", [&] {
    for (const std::vector<uint8_t>& value : store.multiGet(keys)) {
      texts.emplace_back(value.begin(), value.end());
    }
  }));
  return texts;
}

}  // namespace ddp::backends
