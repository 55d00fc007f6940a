// Where other hosts can see whether this process lives: a listening socket behind which nobody
// speaks. The kernel answers there as long as the process exists, be it busy or stopped, and
// refuses once it has ended, one round trip away; a host that is gone says nothing.
//
//   Door* door = Door::OfThisProcess(/*towards=*/"master-host");
//   store->set("door/3", door->address());                     // "10.0.0.2:40123"
//   Knock({"10.0.0.2:40123"}, absl::Milliseconds(100));         // {Answer::kOpen}
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"

namespace ddp::backends::watch {

// Thread-safe.
class Door {
 public:
  // On a port of the system's choice, at the address from which this host reaches `towards` (a name
  // or an address): the one by which others reach this host. May ask a name server. Unavailable if
  // there is no such address.
  static absl::StatusOr<std::unique_ptr<Door>> Open(const std::string& towards);

  // One for all groups of this process, opened by the first call and never closed: a group may end
  // before its process does. Null if it cannot be opened. A forked child gets its own, and closes
  // the parent's, which would otherwise look alive as long as the child.
  static Door* OfThisProcess(const std::string& towards);

  const std::string& address() const { return address_; }

  // Lets go those who have knocked; without it the kernel answers as many as wait in line
  // (somaxconn, 4096 or, before Linux 5.4, 128), and then no more.
  void Answer();

 private:
  Door(UniqueFd listener, std::string address)
      : listener_(std::move(listener)), address_(std::move(address)) {}

  const UniqueFd listener_;
  const std::string address_;
};

// Whether a door's address means this host to whoever uses it.
bool IsLoopback(absl::string_view address);

enum class Answer {
  kOpen,
  kRefused,  // nobody listens there: the process has ended, if the door was ever open to us
  kNone,     // in time, or no way there
};

// At all these doors at once. Waits for `timeout` at most.
std::vector<Answer> Knock(const std::vector<std::string>& addresses, absl::Duration timeout);

}  // namespace ddp::backends::watch
