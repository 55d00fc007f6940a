// Writes event files for tensorboard_interop_test.py to read.
//
//   tensorboard_peer FOLDER    # FOLDER/run, FOLDER/sweep/first and second
#include <cmath>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/status.h"
#include "ddp/trainer/logging/tensorboard_writer.h"

namespace ddp::trainer::logging {
namespace {

// A run of 200 steps, and a run resumed from its step 100.
absl::Status WriteRuns(const std::string& folder) {
  DDP_ASSIGN_OR_RETURN(auto first, TensorBoardWriter::Create({.log_dir = folder}));
  DDP_RETURN_IF_ERROR(
      first->Text("hparams", HparamsTable({{"model", "cnn"}, {"lr", "0.1"}}), /*step=*/0));
  for (int step = 0; step < 200; ++step) {
    DDP_RETURN_IF_ERROR(first->Scalars(
        step, {{"train/loss", 1.0 / (1 + step)}, {"train/lr", step == 0 ? 0.0 : 0.1}}));
  }
  DDP_RETURN_IF_ERROR(first->Scalar("diverged", std::nan(""), 0));
  DDP_RETURN_IF_ERROR(first->Flush());

  DDP_ASSIGN_OR_RETURN(auto second,
                       TensorBoardWriter::Create({.log_dir = folder, .resumed_at_step = 100}));
  for (int step = 100; step < 150; ++step) {
    DDP_RETURN_IF_ERROR(second->Scalar("train/loss", -step, step));
  }
  return second->Flush();
}

// Two jobs of a sweep: one to its end, one that was resumed and has not ended.
absl::Status WriteSweep(const std::string& folder) {
  DDP_ASSIGN_OR_RETURN(auto first, TensorBoardWriter::Create({.log_dir = folder + "/first"}));
  DDP_RETURN_IF_ERROR(first->HyperParameters({{"optimizer.lr", "0.1"},
                                              {"drop_last", "true"},
                                              {"optimizer.name", "sgd"},
                                              {"cap", "auto"}}));
  DDP_RETURN_IF_ERROR(first->Scalar("test/accuracy", 0.25, 10));
  DDP_RETURN_IF_ERROR(first->Scalar("test/accuracy", 0.75, 20));
  DDP_RETURN_IF_ERROR(first->Event(20, {{"event", "run_end"}, {"reason", "end"}, {"saved", ""}}));

  const std::vector<std::pair<std::string, std::string>> options = {
      {"optimizer.lr", "0.01"}, {"drop_last", "true"}, {"optimizer.name", "adam"}, {"cap", "25"}};
  DDP_ASSIGN_OR_RETURN(auto second, TensorBoardWriter::Create({.log_dir = folder + "/second"}));
  DDP_RETURN_IF_ERROR(second->HyperParameters(options));
  DDP_RETURN_IF_ERROR(second->Scalar("test/accuracy", 1, 20));
  DDP_RETURN_IF_ERROR(second->Event(20, {{"event", "run_end"}, {"reason", "signal TERM"}}));
  DDP_ASSIGN_OR_RETURN(auto third, TensorBoardWriter::Create({.log_dir = folder + "/second"}));
  DDP_RETURN_IF_ERROR(third->HyperParameters(options));
  DDP_ASSIGN_OR_RETURN(
      third, TensorBoardWriter::Create({.log_dir = folder + "/second", .resumed_at_step = 11}));
  DDP_RETURN_IF_ERROR(third->Scalar("test/accuracy", 0.5, 20));
  return third->Flush();
}

}  // namespace
}  // namespace ddp::trainer::logging

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
    return 2;
  }
  const std::string folder = argv[1];
  absl::Status status = ddp::trainer::logging::WriteRuns(folder + "/run");
  if (status.ok()) status = ddp::trainer::logging::WriteSweep(folder + "/sweep");
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
