// A program with a loop of its own, of which one rank fails: run_test_main MODE RANK
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "ATen/Parallel.h"
#include "ATen/ops/ones.h"
#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/time/time.h"
#include "base/exit_code.h"
#include "base/option_error.h"
#include "base/option_flags.h"
#include "base/options.h"
#include "base/status.h"
#include "ddp/ddp.h"
#include "ddp/session/session.h"
#include "torch/nn/modules/linear.h"

namespace ddp::session {
namespace {

// One rank makes another call than the others, or none.
absl::Status CallInAnotherOrder(const Session& session, const std::string& mode, bool is_odd) {
  const auto all_reduce = [&] {
    std::vector<at::Tensor> tensors = {at::ones({4})};
    session.process_group()->allreduce(tensors)->wait();
  };
  DDP_ASSIGN_OR_RETURN(auto model, Wrap(torch::nn::Linear(4, 4), session.process_group()));
  const auto step = [&] { model->forward(at::ones({2, 4})).sum().backward(); };
  step();
  if (is_odd && mode == "ends_early") return absl::OkStatus();
  if (is_odd) DDP_RETURN_IF_ERROR(session.AllGather("saved").status());
  mode == "backward" ? step() : all_reduce();
  return absl::OkStatus();
}

absl::Status RunOne(const Session& session, const std::string& mode, int broken) {
  const bool fails = session.rank() == broken;
  if (absl::StrContains(mode, "options") || mode == "folder" || mode == "may_differ") {
    return absl::OkStatus();
  }
  if (mode == "saves_alone" || mode == "ends_early" || mode == "backward") {
    return CallInAnotherOrder(session, mode, fails);
  }
  if (fails && mode == "thread") {
    // The system refuses a thread whose stack does not fit, with the errno of one beyond a limit.
    pthread_attr_t before, endless;
    pthread_getattr_default_np(&before);
    pthread_attr_init(&endless);
    pthread_attr_setstacksize(&endless, size_t{1} << 60);
    pthread_setattr_default_np(&endless);
    const absl::Cleanup restore = [&] { pthread_setattr_default_np(&before); };
    std::thread([] {}).join();
  }
  if (fails && mode == "throw") throw std::runtime_error("the disk is on fire");
  if (fails && mode == "option") return OptionError("optimizer.lr", "-1", "must be at least 0");
  if (mode == "threads") {
    std::printf("computes with %d threads\n", at::get_num_threads());
    return absl::OkStatus();
  }
  if (mode == "local_size") {
    std::printf("%d ranks here, %d threads\n", session.place().local_world_size,
                at::get_num_threads());
    return session.Agree(absl::OkStatus());
  }
  if (fails && mode == "vanish") _exit(77);
  if (fails && mode == "code_in_agree") {
    return session.Agree(WithExitCode(absl::NotFoundError("no file"), 70));
  }
  if (fails && mode == "code") return WithExitCode(absl::NotFoundError("no file"), 70);
  if (mode == "stop" || mode == "stop_and_fail") {
    session.NoteStop(SIGUSR1);
    if (mode == "stop") return session.Agree(absl::OkStatus());
  }
  if (fails) return absl::NotFoundError("no file");
  if (mode == "alone") {
    while (true) pause();  // until the launcher ends this rank
  }
  if (mode == "agree" || mode == "code_in_agree") return session.Agree(absl::OkStatus());
  std::vector<at::Tensor> tensors = {at::ones({4})};
  session.process_group()->allreduce(tensors)->wait();
  return absl::OkStatus();
}

struct Fit {
  double lr = 0.1;
  std::string folder = "";
  SessionOptions session = {};
};
constexpr auto OptionsOf(const Fit&) {
  return Options(Option("lr", &Fit::lr, "learning rate"),
                 Option("folder", &Fit::folder, "a folder").OnAllRanksOrNone(),
                 Inline(&Fit::session));
}

// The options of rank `broken` in MODE; of the others, those that it begins with.
void SetOptions(const std::string& mode, bool is_broken, Fit& fit) {
  SessionOptions& session = fit.session;
  if (mode == "may_differ") {
    fit.folder = is_broken ? "b" : "a";
    session.launcher.grace = absl::Seconds(is_broken ? 4 : 3);
    session.group.hostname = is_broken ? "127.0.0.1" : "";
  }
  if (!is_broken) return;
  if (mode == "options") {
    fit.lr = 0.2;
    session.group.backend = "gloo";
  }
  if (mode == "options" || mode == "own_options") session.group.stall = absl::Seconds(99);
  if (mode == "folder") fit.folder = "b";
}

}  // namespace
}  // namespace ddp::session

int main(int argc, char** argv) {
  if (argc != 3) return 3;
  const std::string mode = argv[1];
  const int broken = std::atoi(argv[2]);
  ddp::session::Fit fit;
  ddp::session::SessionOptions& options = fit.session;
  if (mode != "local_size") {  // whose ranks the test starts
    options.launcher.name = "local";
    options.launcher.nproc_per_node = mode == "threads" ? 1 : 3;
  }
  options.group.timeout = absl::Hours(1);
  // This program is started alike on all ranks; a launcher of others would give each its own.
  const char* rank = std::getenv("RANK");
  ddp::session::SetOptions(mode, rank != nullptr && std::atoi(rank) == broken, fit);
  const ddp::OptionList list = ddp::ListOptions(fit);
  if (mode != "own_options") options.program_options = &list;
  const ddp::OptionSetter setter;
  return ddp::session::Run(
      options, argc, argv,
      [&](const ddp::session::Session& session) {
        return ddp::session::RunOne(session, mode, broken);
      },
      [&](const absl::Status& status) {
        const auto problem = ddp::ProblemOf(status);
        if (!problem) return std::string(status.message());
        if (mode == "option") return "--" + problem->path + " is wrong";
        return mode == "own_options" ? std::string(status.message()) : setter.Explain(status, list);
      });
}
