// Messages between two ranks, through a ring of packets for each direction.
//
// A message is a run of packets, the first of which begins with its tag and size. Messages from one
// rank to another arrive in the order sent; a receive takes the first whose tag fits, and those
// that come before it wait in ordinary memory, as in MPI. A send is done when its last packet is
// in the ring: up to kChannelSlots packets, nobody needs to receive it first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "backends/shm/engine/engine_op.h"
#include "backends/shm/engine/layout.h"
#include "backends/shm/engine/signals.h"

namespace ddp::backends::shm {

// Thread-compatible.
class PointToPoint {
 public:
  using Done = std::function<void(EngineOp* op, const absl::Status& status)>;

  // `done` is called from Advance, for each operation, once.
  PointToPoint(const View& view, int rank, Done done);

  // `op` has one request, kSend or kRecv.
  void Add(EngineOp* op);

  // Moves what can be moved; true if anything was.
  bool Advance();

  bool idle() const { return operations_ == 0; }

  // Calls `f(op, peer)` for each operation that is not done; peer is kAnySource for a receive from
  // anybody. `f` does not change this object.
  void ForEach(const std::function<void(EngineOp*, int)>& f) const;

  // Ends all of them.
  void Fail(const absl::Status& status);

 private:
  struct Outgoing {
    std::deque<EngineOp*> ops;
    uint64_t head = 0;  // packets written
    size_t sent = 0;    // bytes of ops.front()
    bool begun = false;
  };

  // A message that nobody asked for yet, or whose receiver came while it was arriving.
  struct Unexpected {
    int64_t tag = 0;
    size_t bytes = 0;
    std::unique_ptr<std::byte[]> data;
    bool complete = false;
    bool discard = false;  // its receiver has been told that it does not fit
  };

  struct Incoming {
    std::list<Unexpected> unexpected;
    uint64_t tail = 0;  // packets read
    // The message that is arriving.
    bool begun = false;
    size_t bytes = 0, received = 0;
    EngineOp* receiver = nullptr;  // or, if null,
    Unexpected* keeper = nullptr;
  };

  bool AdvanceOutgoing(int peer);
  bool AdvanceIncoming(int peer);
  bool TakeUnexpected(EngineOp* op, int peer);
  EngineOp* FindReceiver(int peer, int64_t tag);
  void Finish(EngineOp* op, int source, absl::Status status);

  const View view_;
  const int rank_;
  const Signals signals_;
  const Done done_;

  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  std::list<EngineOp*> receives_;  // not matched with a message yet, in the order posted
  int operations_ = 0;
};

}  // namespace ddp::backends::shm
