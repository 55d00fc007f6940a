// How far the ranks of a job have come, for a launcher that may start them again: rank 0 writes it,
// into memory that both share.
//
//   DDP_ASSIGN_OR_RETURN(ProgressBoard board, ProgressBoard::Create());          // the launcher;
//   // rank 0 inherits board.fd(), and ProgressBoard::kVariable is its number
//   std::optional<ProgressBoard> board = ProgressBoard::FromEnvironment(env);    // rank 0
//   if (board) board->Begin(/*step=*/400, "runs/a/epoch_3.pt");
//   if (board) board->Reached(401);
//   if (const auto progress = board.Read()) …                                    // the launcher
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/environment.h"
#include "base/unique_fd.h"

namespace ddp {

struct Progress {
  int64_t begun_at = 0;  // the step from which the attempt went on; 0: from the start
  int64_t step = 0;      // the last step that it has taken
  std::string earlier_checkpoint = "";  // one before that which it went on from; empty: none
};

// Movable. Begin and Reached are for one thread of one process; Read may run meanwhile in another.
// What a killed process has written stays.
class ProgressBoard {
 public:
  static constexpr char kVariable[] = "DDP_PROGRESS_FD";

  // Shared memory that ends with the last process that has it.
  static absl::StatusOr<ProgressBoard> Create();
  // nullopt without the variable, and if its descriptor is something else: another program has
  // passed its environment on, and not the descriptor. Makes the descriptor close-on-exec.
  static std::optional<ProgressBoard> FromEnvironment(const Environment& env);

  ProgressBoard(ProgressBoard&& other) noexcept;
  ProgressBoard& operator=(ProgressBoard&& other) noexcept;
  ~ProgressBoard();

  int fd() const { return fd_.get(); }

  void Begin(int64_t step, absl::string_view earlier_checkpoint);
  void Reached(int64_t step);  // takes nanoseconds

  // nullopt if nobody has called Begin since Clear.
  std::optional<Progress> Read() const;
  void Clear();

 private:
  struct Shared;
  ProgressBoard(UniqueFd fd, Shared* shared);
  static absl::StatusOr<ProgressBoard> Map(UniqueFd fd);

  UniqueFd fd_;
  Shared* shared_;
};

}  // namespace ddp
