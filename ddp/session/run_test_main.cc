// A program with a loop of its own, of which one rank fails: run_test_main MODE RANK
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "ATen/ops/ones.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/option_error.h"
#include "ddp/session/session.h"

namespace ddp::session {
namespace {

absl::Status RunOne(const Session& session, const std::string& mode, int broken) {
  const bool fails = session.rank() == broken;
  if (fails && mode == "throw") throw std::runtime_error("the disk is on fire");
  if (fails && mode == "option") return OptionError("optimizer.lr", "-1", "must be at least 0");
  if (fails) return absl::NotFoundError("no file");
  if (mode == "alone") {
    while (true) pause();  // until the launcher ends this rank
  }
  if (mode == "agree") return session.Agree(absl::OkStatus());
  std::vector<at::Tensor> tensors = {at::ones({4})};
  session.process_group()->allreduce(tensors)->wait();
  return absl::OkStatus();
}

}  // namespace
}  // namespace ddp::session

int main(int argc, char** argv) {
  if (argc != 3) return 3;
  ddp::session::SessionOptions options;
  options.launcher.name = "local";
  options.launcher.nproc_per_node = 3;
  options.group.timeout = absl::Hours(1);
  return ddp::session::Run(
      options, argc, argv,
      [&](const ddp::session::Session& session) {
        return ddp::session::RunOne(session, argv[1], std::atoi(argv[2]));
      },
      [](const absl::Status& status) {
        const auto problem = ddp::ProblemOf(status);
        return problem ? "--" + problem->path + " is wrong" : std::string(status.message());
      });
}
