// What a program's user decides about the job: how ranks come to life, where they compute, and how
// they talk to each other.
//
//   session::SessionOptions options = {.launcher = {.default_nproc_per_node = 2}};
#pragma once

#include <string>

#include "absl/time/time.h"
#include "backends/backend.h"
#include "base/options.h"
#include "launchers/launcher.h"

namespace ddp::session {

struct SessionOptions {
  launchers::LaunchOptions launcher = {};
  std::string device = "cpu";  // cpu, cuda, or auto: cuda where there is one
  backends::GroupOptions group = {};
  // Maximum wait for a rank that works alone: loads data, saves a checkpoint. Waits of
  // group.stall and more are reported.
  absl::Duration work_timeout = absl::Minutes(30);
};

constexpr auto OptionsOf(const SessionOptions&) {
  return Options(Nested("launcher", &SessionOptions::launcher, "how ranks come to life"),
                 Option("device", &SessionOptions::device, "what to compute on; auto: cuda if any")
                     .OneOf("cpu", "cuda", "auto"),
                 Nested("group", &SessionOptions::group, "how ranks talk to each other"),
                 Option("work_timeout_s", &SessionOptions::work_timeout,
                        "maximum wait for a rank that works alone (loads, saves), in seconds")
                     .Above(0)
                     .AtMost(1e7));
}

}  // namespace ddp::session
