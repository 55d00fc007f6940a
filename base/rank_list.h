// Ranks in messages.
#pragma once

#include <string>
#include <vector>

namespace ddp {

// "rank 1", "ranks 0, 2", "ranks 0-3, 5"; of ascending ranks. Thread-safe.
std::string RankList(const std::vector<int>& ranks);

}  // namespace ddp
