#include "checkpoint/sharded/spread.h"

#include <algorithm>
#include <numeric>

namespace ddp::checkpoint::sharded {

std::vector<std::vector<Share>> Spread(const std::vector<ReplicatedTensor>& tensors,
                                       std::vector<uint64_t> loads) {
  std::vector<std::vector<Share>> shares(loads.size());
  std::vector<size_t> whole;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const ReplicatedTensor& tensor = tensors[i];
    const auto ranks = static_cast<int64_t>(tensor.holders.size());
    if (tensor.bytes < kCutFrom || ranks < 2 || tensor.shape.empty() || tensor.shape[0] < ranks) {
      whole.push_back(i);
      continue;
    }
    const int64_t rows = tensor.shape[0];
    for (int64_t r = 0; r < ranks; ++r) {
      // The first (rows mod ranks) of them have one row more.
      const int64_t begin = rows / ranks * r + std::min(r, rows % ranks);
      const int64_t count = rows / ranks + (r < rows % ranks ? 1 : 0);
      Box box{std::vector<int64_t>(tensor.shape.size()), tensor.shape};
      box.offset[0] = begin;
      box.sizes[0] = count;
      const auto rank = static_cast<size_t>(tensor.holders[static_cast<size_t>(r)]);
      loads[rank] += tensor.bytes / static_cast<uint64_t>(rows) * static_cast<uint64_t>(count);
      shares[rank].push_back({i, std::move(box)});
    }
  }
  std::stable_sort(whole.begin(), whole.end(),
                   [&](size_t a, size_t b) { return tensors[a].bytes > tensors[b].bytes; });
  for (const size_t i : whole) {
    const ReplicatedTensor& tensor = tensors[i];
    const int rank =
        *std::min_element(tensor.holders.begin(), tensor.holders.end(), [&](int a, int b) {
          return loads[static_cast<size_t>(a)] < loads[static_cast<size_t>(b)];
        });
    loads[static_cast<size_t>(rank)] += tensor.bytes;
    shares[static_cast<size_t>(rank)].push_back(
        {i, Box{std::vector<int64_t>(tensor.shape.size()), tensor.shape}});
  }
  for (std::vector<Share>& of_rank : shares) {
    std::stable_sort(of_rank.begin(), of_rank.end(),
                     [](const Share& a, const Share& b) { return a.tensor < b.tensor; });
  }
  return shares;
}

}  // namespace ddp::checkpoint::sharded
