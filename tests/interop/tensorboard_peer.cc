// Writes event files for tensorboard_interop_test.py to read.
//
//   tensorboard_peer FOLDER
#include <cmath>
#include <cstdio>
#include <string>
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

}  // namespace
}  // namespace ddp::trainer::logging

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
    return 2;
  }
  const absl::Status status = ddp::trainer::logging::WriteRuns(argv[1]);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
