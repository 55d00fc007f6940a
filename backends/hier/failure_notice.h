// Tells all ranks of a group of the first failure in any of them, through the store: one rank's
// lost connection is often the echo of another's death, and the echo alone names nobody.
//
//   FailureNotice notice(store, [&](const std::string& first) { AbortEverything(); });
//   FailureNotice::Busy busy(notice);               // a collective is under way: look out
//   std::string first = notice.Post("rank 2: …");   // may be another rank's
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "absl/time/time.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::backends::hier {

// Thread-safe. Keeps its own connection to the store, and a thread: the store may be gone, too, and
// then its calls can take long.
class FailureNotice {
 public:
  // `on_failure` is called at most once, on the thread of this object, when another rank has
  // posted.
  FailureNotice(const c10::intrusive_ptr<c10d::Store>& store,
                std::function<void(const std::string& first)> on_failure);
  ~FailureNotice();
  FailureNotice(const FailureNotice&) = delete;
  FailureNotice& operator=(const FailureNotice&) = delete;

  // Posts `message` unless a rank has posted already. Returns the first message posted; this one
  // if the store does not answer soon.
  std::string Post(const std::string& message);

  // While one exists, the store is looked at every 200 ms.
  class Busy {
   public:
    explicit Busy(FailureNotice& notice) : notice_(notice) { notice_.AddBusy(1); }
    ~Busy() { notice_.AddBusy(-1); }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

   private:
    FailureNotice& notice_;
  };

 private:
  void AddBusy(int change);
  void Loop();
  // What stands in the store after `message` was offered to it, or, without one, what stands there.
  std::optional<std::string> Ask(const std::optional<std::string>& message);

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::function<void(const std::string& first)> on_failure_;

  std::mutex mutex_;
  std::condition_variable changed_;
  int busy_ = 0;
  bool stopping_ = false;
  std::optional<std::string> own_;    // to be posted
  std::optional<std::string> first_;  // no more questions once it is known
  std::thread thread_;
};

}  // namespace ddp::backends::hier
