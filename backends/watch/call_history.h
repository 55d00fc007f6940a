// The calls that this rank has made in one group: collectives, messages, and their Works.
//
//   CallHistory history(/*size=*/4);
//   const uint64_t number = history.collectives().Begin(record);
//   history.collectives().Attach(number, work.get());
//   history.OldestCollective();   // {number, record} until the Work has completed
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "backends/watch/recorder.h"

namespace ddp::backends::watch {

// Thread-safe. The recorders' handles are c10d::Work*.
class CallHistory {
 public:
  struct Call {
    uint64_t number = 0;
    CallRecord record = {};
  };

  explicit CallHistory(int size);

  Recorder& collectives() { return collectives_; }
  const Recorder& collectives() const { return collectives_; }
  // Sends and receives: never compared between ranks.
  Recorder& messages() { return messages_; }
  const Recorder& messages() const { return messages_; }

  // Ignores ranks out of range: the inner backend refuses them.
  void CountMessage(bool sent, int peer);
  // Number of messages sent to and received from `peer`.
  uint64_t sent(int peer) const { return sent_[peer].load(); }
  uint64_t received(int peer) const { return received_[peer].load(); }

  // Marks calls whose Work has completed as ended. Returns the oldest pending call. A message
  // counts only while a thread waits for it, because Gloo's message Works complete only in wait().
  std::optional<Call> OldestCollective();
  std::optional<Call> OldestMessage();

  // Aborts the Works of all pending messages. Ignores errors: not every Work supports it.
  void AbortMessages();

  // Releases all Works.
  void Clear();

 private:
  Recorder collectives_;
  Recorder messages_;
  std::vector<std::atomic<uint64_t>> sent_;
  std::vector<std::atomic<uint64_t>> received_;
};

}  // namespace ddp::backends::watch
