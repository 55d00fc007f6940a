// Base of the other libraries in //tools/bench:collectives: plain buffers, in place or separate.
//
//   class MpiCollectives : public PeerCollectives { … };
//   return ServePeer(argc, argv, "float32,float64", place, mine);
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "tools/bench/collective_server.h"
#include "tools/bench/collective_task.h"

namespace ddp::tools::bench {

// Offers two variants of each collective, in_place and separate; the benchmark uses the faster one.
// Thread-compatible.
class PeerCollectives : public Collectives {
 public:
  explicit PeerCollectives(Place place) : place_(place) {}

  absl::StatusOr<Buffers> Prepare(const CollectiveTask& task) final;
  void Free() final;

 protected:
  // InvalidArgument if the library does not support the dtype.
  virtual absl::Status SetType(Dtype dtype) = 0;

  // Whether the library supports in-place calls as in this class: input at the address of the
  // output, for all-gather at this rank's share of it. If not, both variants are separate.
  virtual bool MayBeInPlace(CollectiveOp) const { return true; }

  // Properties of the prepared task. In place, all-gather's input is within its output.
  CollectiveOp op() const { return op_; }
  bool in_place() const { return in_place_; }
  const void* input() const { return input_; }
  void* output() const { return output_; }
  int64_t input_count() const { return input_count_; }    // elements
  int64_t output_count() const { return output_count_; }  // elements
  const Place& place() const { return place_; }

 private:
  struct Freed {
    void operator()(void* memory) const { free(memory); }
  };
  using Memory = std::unique_ptr<void, Freed>;

  static Memory Allocate(int64_t bytes);

  const Place place_;
  CollectiveOp op_ = CollectiveOp::kAllReduce;
  bool in_place_ = true;
  int64_t bytes_ = 0;
  int64_t input_count_ = 0;
  int64_t output_count_ = 0;
  // Each is large enough for input and output.
  Memory first_;
  Memory second_;
  void* input_ = nullptr;
  void* output_ = nullptr;
};

// main() of a peer: ServeTasks on the socket of --control=SOCKET, the only argument. `dtypes`:
// those that SetType accepts, separated by commas. Returns the exit status.
int ServePeer(int argc, char** argv, absl::string_view dtypes, const Place& place,
              Collectives& collectives);

}  // namespace ddp::tools::bench
