// For tests: ranks as threads over one mapping, without torch, so that ThreadSanitizer sees every
// access of every rank. Tests with torch use backends/conformance/rank_threads.h.
//
//   RunEngines(4, [](Rank& self) {
//     std::vector<float> tensor = Values(self.rank(), 1000, /*round=*/1);
//     ASSERT_EQ(self.Run(AllReduce(Data(tensor), tensor.size())), absl::OkStatus());
//     ASSERT_EQ(tensor, Sums(self.world_size(), 1000, 1));
//   });
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/log/absl_check.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "backends/shm/engine/engine.h"
#include "base/threads_testing.h"

namespace ddp::backends::shm {

constexpr int64_t kSecond = 1'000'000'000;

// A segment in ordinary memory, all zeros as a fresh memfd is.
class Segment {
 public:
  Segment(int world_size, const Limits& limits)
      : layout_(*SegmentLayout::Plan(world_size, limits)) {
    base_ = ::mmap(nullptr, layout_.bytes(), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ABSL_CHECK(base_ != MAP_FAILED);
  }
  ~Segment() { ::munmap(base_, layout_.bytes()); }
  View view() const { return View(layout_, base_); }

 private:
  SegmentLayout layout_;
  void* base_;
};

// One rank: its engine, and blocking calls.
class Rank {
 public:
  Rank(const Segment& segment, int rank, std::vector<PeerInfo> peers, EngineOptions options = {})
      : rank_(rank),
        view_(segment.view()),
        engine_(std::make_shared<Engine>(view_, rank, std::move(peers), options)) {}
  ~Rank() {
    if (!has_left_) engine_->Leave();
  }

  int rank() const { return rank_; }
  int world_size() const { return view_.world_size(); }
  const View& view() const { return view_; }
  Engine& engine() { return *engine_; }
  void Leave() {
    has_left_ = true;
    engine_->Leave();
  }

  absl::Status Run(Request request, int64_t timeout_ns = 60 * kSecond) {
    EngineOp op;
    op.requests.push_back(std::move(request));
    op.timeout_ns = timeout_ns;
    engine_->Submit(&op);
    return engine_->Wait(&op, NowNs() + timeout_ns + 10 * kSecond);
  }

 private:
  const int rank_;
  const View view_;
  std::shared_ptr<Engine> engine_;
  bool has_left_ = false;
};

inline std::vector<PeerInfo> NamedPeers(int world_size) {
  std::vector<PeerInfo> peers(world_size);
  for (int rank = 0; rank < world_size; ++rank) peers[rank].name = absl::StrCat("rank ", rank);
  return peers;
}

inline void RunEngines(int world_size, const std::function<void(Rank&)>& body, Limits limits = {},
                       EngineOptions options = {}) {
  Segment segment(world_size, limits);
  RunThreads(world_size, [&](int rank) {
    Rank self(segment, rank, NamedPeers(world_size), options);
    body(self);
  });
}

template <typename T>
std::byte* Data(std::vector<T>& values) {
  return reinterpret_cast<std::byte*>(values.data());
}

inline Buffer ToBuffer(std::vector<float>& values) {
  return {Data(values), values.size() * sizeof(float)};
}

// Differs by rank, position and round; sums are exact.
inline float Value(int rank, size_t i, int round) {
  return static_cast<float>((i * 7 + rank * 13 + round * 5) % 101);
}

inline std::vector<float> Values(int rank, size_t count, int round) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = Value(rank, i, round);
  return values;
}

inline std::vector<float> Sums(int world_size, size_t count, int round) {
  std::vector<float> sums(count);
  for (size_t i = 0; i < count; ++i) {
    for (int rank = 0; rank < world_size; ++rank) sums[i] += Value(rank, i, round);
  }
  return sums;
}

inline Request AllReduce(std::byte* tensor, size_t count) {
  Request request;
  request.kind = Kind::kAllReduce;
  request.reduction = {DType::kFloat, ReduceOp::kSum, 1};
  request.tensor = tensor;
  request.count = count;
  return request;
}

}  // namespace ddp::backends::shm
