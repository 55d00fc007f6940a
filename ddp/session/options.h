// Options of a job: its launcher, the device of its ranks, and their process group.
//
//   session::SessionOptions options = {.launcher = {.default_nproc_per_node = 2}};
#pragma once

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "backends/backend.h"
#include "base/options.h"
#include "launchers/launcher.h"

namespace ddp::session {

// The forms of SessionOptions::device, for the help; "cuda:N" stands for any N.
std::vector<std::string> DeviceNames();

struct SessionOptions {
  launchers::LaunchOptions launcher = {};
  // cpu; cuda: GPU number LOCAL_RANK of the machine; cuda:N: GPU N, which all ranks of the machine
  // share; auto: cuda in a CUDA build on a machine with a GPU, otherwise cpu.
  std::string device = "auto";
  backends::GroupOptions group = {};
  // Maximum wait of Coordinator calls, while one rank loads data or saves a checkpoint. Waits of
  // group.stall and longer are reported.
  absl::Duration work_timeout = absl::Minutes(30);

  // The program sets the member below, not its user.
  // All options of the program, these included: the ranks compare them before they do anything
  // together (base/same_options.h). Not owned; it must outlive Run. Null: only these are compared.
  const OptionList* program_options = nullptr;
};

constexpr auto OptionsOf(const SessionOptions&) {
  return Options(
      Nested("launcher", &SessionOptions::launcher, "how the ranks are started").MayDiffer(),
      Option("device", &SessionOptions::device,
             "device of the ranks; auto: cuda if there is one; cuda:N: GPU N for all "
             "ranks of a machine")
          .Lists(DeviceNames)
          .MayDiffer(),  // its type may not: Run compares that
      Nested("group", &SessionOptions::group, "communication between ranks"),
      Option("work_timeout_s", &SessionOptions::work_timeout,
             "maximum wait for a rank that works alone (loads, saves), in seconds")
          .Above(0)
          .AtMost(1e7)
          .Incidental());
}

}  // namespace ddp::session
