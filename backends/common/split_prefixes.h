// Store prefixes for the groups that Backend::split makes. split may be called many times with one
// store, and each group may have other ranks of the parent; each needs keys of its own.
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

// Thread-safe.
class SplitPrefixes {
 public:
  // Each member of the new group, and no other rank, must call this once per split: then all
  // members get the same prefix. `ranks` are numbers in the parent.
  std::string Next(const std::vector<int>& ranks) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return absl::StrCat("split/", absl::StrJoin(ranks, ","), "/", ++times_[ranks]);
  }

 private:
  std::mutex mutex_;
  std::map<std::vector<int>, int> times_;
};

}  // namespace ddp::backends
