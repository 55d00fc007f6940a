// Where in a store the ranks of a new group meet: Backend::split may be called again and again with
// one store, and not all ranks of the parent are in all groups.
//
//   PrefixStore(prefixes.Next({1, 3}), store)     // "split/1,3/1", the next time "split/1,3/2"
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ddp::backends {

// Thread-safe. To be asked by the members of the new group, and by nobody else: then they agree.
class SplitPrefixes {
 public:
  std::string Next(const std::vector<int>& ranks) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return absl::StrCat("split/", absl::StrJoin(ranks, ","), "/", ++times_[ranks]);
  }

 private:
  std::mutex mutex_;
  std::map<std::vector<int>, int> times_;
};

}  // namespace ddp::backends
