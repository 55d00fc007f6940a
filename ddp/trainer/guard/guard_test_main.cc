// A run of two ranks, with restarts, whose rank 1 has a loss that is NaN in step 7:
//   guard_test_main BACKEND ON_ANOMALY FOLDER
// Each rank writes the bytes of its parameters to FOLDER/rank_N.
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/file.h"
#include "base/status.h"
#include "ddp/session/session.h"
#include "ddp/trainer/guard/guard_testing.h"

namespace ddp::trainer {
namespace {

absl::Status RunOne(const session::Session& session, const std::string& on_anomaly,
                    const std::string& folder) {
  TrainerOptions options = Quiet();
  options.epochs = 1;
  options.guard.on_anomaly = on_anomaly;
  options.log.dir = folder + "/logs";
  options.checkpoint.manager.directory = folder + "/checkpoints";
  options.checkpoint.every_steps = 5;
  options.checkpoint.resume = "auto";
  const Task task = SpoiltNet(NaNIn({7}));
  DDP_RETURN_IF_ERROR(Train(session, task, Halves(320), Halves(60), options).status());
  std::string bytes;
  for (const at::Tensor& parameter : task.module->parameters()) {
    const at::Tensor values = parameter.detach().contiguous();
    bytes.append(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
  }
  return WriteFileAtomically(absl::StrCat(folder, "/rank_", session.rank()), bytes);
}

}  // namespace
}  // namespace ddp::trainer

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  ddp::session::SessionOptions options;
  options.launcher.name = "local";
  options.launcher.nproc_per_node = 2;
  options.launcher.max_restarts = 2;
  options.group.backend = argv[1];
  return ddp::session::Run(options, argc, argv, [&](const ddp::session::Session& session) {
    return ddp::trainer::RunOne(session, argv[2], argv[3]);
  });
}
