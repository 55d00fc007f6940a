// What the peers of //tools/bench:collectives have in common: plain buffers, used in place or not.
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

// Thread-compatible. Has two variants of each collective, in_place and separate; whoever measures
// takes the faster.
class PeerCollectives : public Collectives {
 public:
  explicit PeerCollectives(Place place) : place_(place) {}

  absl::StatusOr<Buffers> Prepare(const Task& task) final;
  void Free() final;

 protected:
  // InvalidArgument for a type that the library does not have.
  virtual absl::Status SetType(Dtype dtype) = 0;

  // Whether the library's call may find its input where it leaves its output, as this class has it:
  // at the same address, and for all-gather at this rank's share of it. If not, both variants are
  // the separate one.
  virtual bool MayBeInPlace(CollectiveOp) const { return true; }

  // Of the task that was prepared. In place, all-gather's input lies within its output.
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
  // Either has room for the larger of input and output.
  Memory first_;
  Memory second_;
  void* input_ = nullptr;
  void* output_ = nullptr;
};

// Serves what --control=SOCKET, the only argument, names; `dtypes` are those that SetType takes,
// with commas. Returns the exit status of the program.
int ServePeer(int argc, char** argv, absl::string_view dtypes, const Place& place,
              Collectives& collectives);

}  // namespace ddp::tools::bench
