// Reads from the folder of a running job how far it is.
//
//   const JobProgress progress = ReadProgress("runs/sweep/lr=0.1-1f3a9c2e");
//   printf("epoch %s, %s left\n", progress.epoch.c_str(), progress.eta.c_str());
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace ddp::config {

struct JobProgress {
  std::string epoch;  // "2/10"; empty: not known
  std::string eta;    // time to the end of the run, "1h05m"; empty: not known
};

// Reads the job's metrics.jsonl: the last epoch and its steps, and the times of the steps since the
// last attempt has begun; and max_steps of its config.yaml. Where metrics.jsonl names no epoch, the
// last line of progress in the job's log counts, "epoch 2/10 step 422/938 …". Thread-safe.
JobProgress ReadProgress(const std::string& folder);

// The contents of these files.
struct ProgressFiles {
  absl::string_view log = "";
  absl::string_view metrics = "";
  absl::string_view attempts = "";
  absl::string_view config = "";
};
JobProgress ProgressIn(const ProgressFiles& files);

}  // namespace ddp::config
