// A run of three ranks of which one fails:
//   failure_test_main BACKEND
//   loader|log|killed|killed_in_agree|killed_in_both|killed_in_save RANK FOLDER [LAUNCHER]
#include <atomic>
#include <csignal>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "ATen/ops/ones.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "base/file.h"
#include "ddp/session/session.h"
#include "ddp/trainer/trainer_testing.h"

namespace ddp::trainer {
namespace {

// An example that is read alone, before the training or after an error, is no batch.
class Broken : public Halves {
 public:
  using Halves::Halves;
  data::Batch Get(absl::Span<const int64_t> indices) const override {
    if (indices.size() > 1 && ++batches_ == 3) throw std::runtime_error("the disk is on fire");
    return Halves::Get(indices);
  }

 private:
  mutable int batches_ = 0;
};

// Kills the process that writes, once it is armed.
class Deadly : public FileSystem {
 public:
  void Arm() { armed_ = true; }
  ssize_t Write(int fd, const void* data, size_t size) override {
    if (armed_) std::raise(SIGKILL);
    return FileSystem::Write(fd, data, size);
  }

 private:
  std::atomic<bool> armed_ = false;
};

absl::Status RunOne(const session::Session& session, const std::string& what, int rank,
                    const std::string& folder) {
  const bool fails = session.rank() == rank;
  TrainerOptions options = Quiet();
  if (what == "log") {
    options.log.dir = folder;
    if (session.is_main()) {
      std::filesystem::create_symlink("/dev/full", folder + "/metrics.jsonl");
    }
  }
  if (what == "killed" && fails) {
    options.on_step = [](int64_t step, const at::Tensor&) {
      if (step == 3) std::raise(SIGKILL);
      return StepAction::kContinue;
    };
  }
  Deadly disk;
  if (what == "killed_in_save") {
    options.epochs = 10000;  // the run does not end before
    options.checkpoint.manager.directory = folder + "/checkpoints";
    options.checkpoint.manager.format = "sharded";
    options.checkpoint.every_steps = 3;
    options.checkpoint.async = true;
    if (fails) {
      options.checkpoint.manager.files = &disk;
      options.on_step = [&disk](int64_t step, const at::Tensor&) {
        if (step == 3) disk.Arm();
        return StepAction::kContinue;
      };
    }
  } else if (absl::StartsWith(what, "killed_in_")) {
    if (absl::Status started = session.Agree(absl::OkStatus()); !started.ok()) return started;
    if (fails) std::raise(SIGKILL);
    if (what == "killed_in_agree" || session.rank() == (rank + 1) % session.size()) {
      return session.Agree(absl::OkStatus());
    }
    std::vector<at::Tensor> tensors = {at::ones({4})};
    session.process_group()->allreduce(tensors)->wait();
  }
  if (what == "loader" && fails) {
    return Train(session, NetTask(), Broken(480), Halves(60), options).status();
  }
  return Train(session, NetTask(), Halves(480), Halves(60), options).status();
}

}  // namespace
}  // namespace ddp::trainer

int main(int argc, char** argv) {
  int rank = 0;
  if (argc < 5 || argc > 6 || !absl::SimpleAtoi(argv[3], &rank)) return 2;
  ddp::session::SessionOptions options;
  options.launcher.name = argc > 5 ? argv[5] : "local";
  options.launcher.nproc_per_node = 3;
  options.group.backend = argv[1];
  options.group.timeout = absl::Hours(1);
  return ddp::session::Run(options, argc, argv, [&](const ddp::session::Session& session) {
    return ddp::trainer::RunOne(session, argv[2], rank, argv[4]);
  });
}
