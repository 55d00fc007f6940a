#include "backends/shm/engine/point_to_point.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ddp::backends::shm {
namespace {

// The start of the first packet of a message.
struct Preamble {
  int64_t tag;
  uint64_t bytes;
};

absl::Status CheckSize(const Request& receive, int peer, size_t bytes) {
  if (receive.count == bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("rank ", peer, " sent ", bytes, " bytes with tag ",
                                                 receive.tag, ", but the receive expects ",
                                                 receive.count));
}

}  // namespace

PointToPoint::PointToPoint(const View& view, int rank, Done done)
    : view_(view),
      rank_(rank),
      signals_(view, rank),
      done_(std::move(done)),
      outgoing_(view.world_size()),
      incoming_(view.world_size()) {}

void PointToPoint::Add(EngineOp* op) {
  const Request& request = op->requests[0];
  ++operations_;
  if (request.kind == Kind::kSend) {
    outgoing_[request.root].ops.push_back(op);
    return;
  }
  const bool any = request.root == kAnySource;
  for (int peer = any ? 0 : request.root; peer < (any ? view_.world_size() : request.root + 1);
       ++peer) {
    if (TakeUnexpected(op, peer)) return;
  }
  receives_.push_back(op);
}

bool PointToPoint::Advance() {
  bool moved = false;
  for (int peer = 0; peer < view_.world_size(); ++peer) {
    if (!outgoing_[peer].ops.empty()) moved |= AdvanceOutgoing(peer);
  }
  for (int peer = 0; peer < view_.world_size(); ++peer) {
    const bool wanted = incoming_[peer].begun ||
                        std::any_of(receives_.begin(), receives_.end(), [peer](EngineOp* op) {
                          const int from = op->requests[0].root;
                          return from == peer || from == kAnySource;
                        });
    if (wanted) moved |= AdvanceIncoming(peer);
  }
  return moved;
}

void PointToPoint::ForEach(const std::function<void(EngineOp*, int)>& f) const {
  for (size_t peer = 0; peer < outgoing_.size(); ++peer) {
    for (EngineOp* op : outgoing_[peer].ops) f(op, static_cast<int>(peer));
  }
  for (size_t peer = 0; peer < incoming_.size(); ++peer) {
    if (incoming_[peer].receiver != nullptr) f(incoming_[peer].receiver, static_cast<int>(peer));
  }
  for (EngineOp* op : receives_) f(op, op->requests[0].root);
}

void PointToPoint::Fail(const absl::Status& status) {
  std::vector<EngineOp*> all;
  ForEach([&all](EngineOp* op, int) { all.push_back(op); });
  for (Outgoing& out : outgoing_) out.ops.clear();
  for (Incoming& in : incoming_) in.receiver = nullptr;
  receives_.clear();
  for (EngineOp* op : all) Finish(op, -1, status);
}

bool PointToPoint::AdvanceOutgoing(int peer) {
  Outgoing& out = outgoing_[peer];
  Channel& channel = view_.channel(rank_, peer);
  const size_t packet_bytes = view_.layout().packet_bytes();
  bool moved = false;
  while (!out.ops.empty() &&
         out.head - channel.tail.load(std::memory_order_seq_cst) < kChannelSlots) {
    EngineOp* op = out.ops.front();
    const Request& request = op->requests[0];
    std::byte* packet = view_.packet(rank_, peer, out.head);
    size_t room = packet_bytes;
    if (!out.begun) {
      const Preamble preamble = {request.tag, request.count};
      std::memcpy(packet, &preamble, sizeof(preamble));
      packet += sizeof(preamble);
      room -= sizeof(preamble);
      out.begun = true;
      out.sent = 0;
    }
    const size_t bytes = std::min(room, request.count - out.sent);
    if (bytes != 0) std::memcpy(packet, request.tensor + out.sent, bytes);
    out.sent += bytes;
    signals_.PublishTo(peer, &channel.head, ++out.head);
    moved = true;
    if (out.sent == request.count) {
      out.ops.pop_front();
      out.begun = false;
      Finish(op, -1, absl::OkStatus());
    }
  }
  return moved;
}

bool PointToPoint::AdvanceIncoming(int peer) {
  Incoming& in = incoming_[peer];
  Channel& channel = view_.channel(peer, rank_);
  const size_t packet_bytes = view_.layout().packet_bytes();
  bool moved = false;
  while (in.tail < channel.head.load(std::memory_order_seq_cst)) {
    const std::byte* packet = view_.packet(peer, rank_, in.tail);
    size_t room = packet_bytes;
    if (!in.begun) {
      Preamble preamble;
      std::memcpy(&preamble, packet, sizeof(preamble));
      packet += sizeof(preamble);
      room -= sizeof(preamble);
      in.begun = true;
      in.bytes = preamble.bytes;
      in.received = 0;
      in.receiver = FindReceiver(peer, preamble.tag);
      // A message of the wrong size is read too, because the channel has to be emptied.
      bool discard = false;
      if (in.receiver != nullptr) {
        absl::Status fits = CheckSize(in.receiver->requests[0], peer, in.bytes);
        discard = !fits.ok();
        if (discard) Finish(std::exchange(in.receiver, nullptr), peer, std::move(fits));
      }
      in.keeper = nullptr;
      if (in.receiver == nullptr) {
        in.unexpected.push_back({preamble.tag, in.bytes, nullptr, false, discard});
        in.keeper = &in.unexpected.back();
        in.keeper->data = std::make_unique<std::byte[]>(in.bytes);
      }
    }
    const size_t bytes = std::min(room, in.bytes - in.received);
    std::byte* to =
        in.receiver != nullptr ? in.receiver->requests[0].tensor : in.keeper->data.get();
    if (bytes != 0) std::memcpy(to + in.received, packet, bytes);
    in.received += bytes;
    signals_.PublishTo(peer, &channel.tail, ++in.tail);
    moved = true;
    if (in.received < in.bytes) continue;

    in.begun = false;
    if (in.receiver != nullptr) {
      Finish(std::exchange(in.receiver, nullptr), peer, absl::OkStatus());
    } else if (in.keeper->discard) {
      in.unexpected.pop_back();
    } else {
      in.keeper->complete = true;
      if (EngineOp* op = FindReceiver(peer, in.keeper->tag)) {
        const bool taken = TakeUnexpected(op, peer);
        if (!taken) receives_.push_front(op);
      }
    }
    // Stop if no receive waits for a further message.
    const bool wanted = std::any_of(receives_.begin(), receives_.end(), [peer](EngineOp* op) {
      const int from = op->requests[0].root;
      return from == peer || from == kAnySource;
    });
    if (!wanted) break;
  }
  return moved;
}

bool PointToPoint::TakeUnexpected(EngineOp* op, int peer) {
  std::list<Unexpected>& messages = incoming_[peer].unexpected;
  const Request& request = op->requests[0];
  for (auto message = messages.begin(); message != messages.end(); ++message) {
    if (message->tag != request.tag || message->discard) continue;
    // The message is still arriving; it is matched with the receive when it is complete.
    if (!message->complete) return false;
    absl::Status fits = CheckSize(request, peer, message->bytes);
    if (fits.ok() && message->bytes != 0) {
      std::memcpy(request.tensor, message->data.get(), message->bytes);
    }
    messages.erase(message);
    Finish(op, peer, std::move(fits));
    return true;
  }
  return false;
}

EngineOp* PointToPoint::FindReceiver(int peer, int64_t tag) {
  const auto found = std::find_if(receives_.begin(), receives_.end(), [&](EngineOp* op) {
    const Request& request = op->requests[0];
    return (request.root == peer || request.root == kAnySource) && request.tag == tag;
  });
  if (found == receives_.end()) return nullptr;
  EngineOp* op = *found;
  receives_.erase(found);
  return op;
}

void PointToPoint::Finish(EngineOp* op, int source, absl::Status status) {
  --operations_;
  op->source_ = source;
  done_(op, std::move(status));
}

}  // namespace ddp::backends::shm
