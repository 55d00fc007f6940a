// Where the output of a local rank goes, by torchrun's options of the same names.
//
//   DDP_ASSIGN_OR_RETURN(const OutputPlan plan, OutputPlan::From(local_options));
//   const OutputPlan::Way way = plan.Of(/*local_rank=*/1, OutputPlan::kStderr);
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>

#include "absl/status/statusor.h"
#include "launchers/local/options.h"

namespace ddp::launchers {

// A value. LocalOptions::redirects and tee say "N" for all ranks, or "LOCAL_RANK:N,…"; N is the sum
// of kStdout and kStderr. Files are LocalOptions::log_dir/attempt_N/RANK/stdout.log and stderr.log.
class OutputPlan {
 public:
  static constexpr int kStdout = 1;
  static constexpr int kStderr = 2;

  struct Way {
    bool to_file = false;
    bool to_terminal = true;
  };

  // OptionError: a value of another form, a rank that is not below `ranks`, the number of local
  // ranks, or files that no folder is given for.
  static absl::StatusOr<OutputPlan> From(const LocalOptions& options, int ranks);

  Way Of(int local_rank, int stream) const;
  const std::string& folder() const { return folder_; }
  // Returns the path of the file for a rank of an attempt; does not create it.
  std::string FileOf(int attempt, int rank, int stream) const;

 private:
  struct Streams {
    int all = 0;
    std::map<int, int> of_rank;

    bool Has(int local_rank, int stream) const;
  };
  static absl::StatusOr<Streams> Parse(const char* option, const std::string& text, int ranks);

  std::string folder_;
  Streams redirects_;
  Streams tee_;
  std::optional<std::set<int>> shown_;  // local ranks; nullopt: all
};

}  // namespace ddp::launchers
