// Ranks as threads of one process, whose groups outlive a test: connecting eight ranks costs more
// than most cases.
//
//   RankPool pool("gloo", /*world_size=*/4, absl::Seconds(30));
//   std::vector<absl::Status> statuses = pool.Run([&](int rank, Groups& groups) {
//     return groups.Run(c, salt);
//   });
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "backends/conformance/groups.h"

namespace ddp::backends::conformance {

// Not thread safe.
class RankPool {
 public:
  // Groups are made at the first Run.
  RankPool(std::string backend, int world_size, absl::Duration timeout);

  // Calls `body` as each rank, in a thread each, and waits for all. An exception of `body`, or an
  // error when groups are created, is the status of that rank. After an unexpected error call
  // Reset(), because the groups must not be used again.
  std::vector<absl::Status> Run(const std::function<absl::Status(int rank, Groups& groups)>& body);

  // The next Run makes new groups.
  void Reset();

 private:
  const std::string backend_;
  const int world_size_;
  const absl::Duration timeout_;
  int generation_ = 0;
  std::vector<std::unique_ptr<Groups>> groups_;
};

// The first wrong result (DataLoss) of all ranks; failing that, the first error.
absl::Status Worst(const std::vector<absl::Status>& statuses);

}  // namespace ddp::backends::conformance
