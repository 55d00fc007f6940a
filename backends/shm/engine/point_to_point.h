// Messages between two ranks, through a ring of packets for each direction.
//
//   PointToPoint messages(view, rank, [](EngineOp* op, const absl::Status& status) { … });
//   messages.Add(&op);
//   while (messages.Advance()) {}
//
// A message is a sequence of packets; the first one begins with tag and size. Messages from one
// rank to another arrive in the order sent. A receive takes the first message with its tag; earlier
// messages with other tags are kept in private memory, as in MPI. A send is done when its last
// packet is in the ring; a message of up to kChannelSlots packets does not wait for its receiver.
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

  // `done` is called once for each operation, from Add, Advance or Fail.
  PointToPoint(const View& view, int rank, Done done);

  // `op` has one request, kSend or kRecv, and is borrowed until `done`.
  void Add(EngineOp* op);

  // Moves packets without waiting; true if there was progress.
  bool Advance();

  bool idle() const { return operations_ == 0; }

  // Calls `f(op, peer)` for each pending operation; `peer` is kAnySource for a receive from any
  // rank. `f` must not change this object.
  void ForEach(const std::function<void(EngineOp*, int)>& f) const;

  // Ends all pending operations with `status`.
  void Fail(const absl::Status& status);

 private:
  struct Outgoing {
    std::deque<EngineOp*> ops;
    uint64_t head = 0;  // packets written
    size_t sent = 0;    // bytes of ops.front() so far
    bool begun = false;
  };

  // A message that arrived, at least in part, before a receive asked for it.
  struct Unexpected {
    int64_t tag = 0;
    size_t bytes = 0;
    std::unique_ptr<std::byte[]> data;
    bool complete = false;
    bool discard = false;  // its size did not match the receive, which has failed
  };

  struct Incoming {
    std::list<Unexpected> unexpected;
    uint64_t tail = 0;  // packets read
    // The message that is arriving goes to `receiver` or, if that is null, to `keeper`.
    bool begun = false;
    size_t bytes = 0, received = 0;
    EngineOp* receiver = nullptr;
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
  std::list<EngineOp*> receives_;  // not matched with a message yet, in the order of the calls
  int operations_ = 0;
};

}  // namespace ddp::backends::shm
