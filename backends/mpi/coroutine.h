// The condition that coroutines of backend mpi wait for: all requests of a set have completed.
//
//   Coroutine SendTwice(Channel& channel, Buffer buffer) {
//     for (int i = 0; i < 2; ++i) {
//       absl::Status status = channel.requests.Send(buffer, /*peer=*/1, /*tag=*/i, channel.comm);
//       if (!status.ok()) co_return status;
//       status = co_await channel.requests;
//       if (!status.ok()) co_return status;
//     }
//     co_return absl::OkStatus();
//   }
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "backends/common/coroutine.h"
#include "backends/mpi/requests.h"

namespace ddp::backends::mpi {

class AllDone {
 public:
  AllDone(Requests& requests) : requests_(&requests) {}  // NOLINT: what is awaited is a Requests&

  bool Ready() {
    const absl::StatusOr<bool> done = requests_->Test();
    if (done.ok() && !*done) return false;
    result_ = done.status();
    return true;
  }
  absl::Status Result() { return std::move(result_); }

 private:
  Requests* requests_;
  absl::Status result_;
};

using Coroutine = ::ddp::backends::Coroutine<AllDone>;

}  // namespace ddp::backends::mpi
