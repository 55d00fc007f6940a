// The file in which a rank leaves the cause of its failure for torchrun's agent, which prints it in
// its report and takes the earliest cause of all ranks for the first.
//
//   const Environment env = Environment::FromProcess();
//   WriteErrorFile(env, {.message = "no data in /data", .exit_code = 1});
//   const std::optional<RankError> before = PreviousError(env, /*restart_count=*/2);
//
// Format and name are those of torch.distributed.elastic.multiprocessing.errors:
// TORCHELASTIC_ERROR_FILE is LOG_DIR/attempt_N/LOCAL_RANK/error.json. Functions are thread-safe.
#pragma once

#include <optional>
#include <string>

#include "base/environment.h"

namespace ddp {

struct RankError {
  std::string message;
  int exit_code = 1;
};

// Nothing without the variable. What cannot be written is left out: the process ends anyway, and
// has printed its message.
void WriteErrorFile(const Environment& env, const RankError& error);

// Returns what the rank of this number has left on this machine in the attempt before this one;
// nullopt if nothing can be found.
std::optional<RankError> PreviousError(const Environment& env, int restart_count);

// The last component of LOG_DIR, which torchrun makes for each start of it, under a name of its
// own, and keeps in all attempts: "none_x1y2z3"; empty without the variable.
std::string RunFolderOf(const Environment& env);

}  // namespace ddp
