// Options of a Watchdog, shared by the classes that it consists of.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "backends/watch/training_thread.h"
#include "c10/util/intrusive_ptr.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::backends::watch {

struct WatchdogOptions {
  int rank = 0;
  int size = 1;
  std::string name = {};                       // of the group, for messages: "gloo"
  c10::intrusive_ptr<c10d::Store> store = {};  // this watchdog's own connection
  std::string host = {};  // HostId(); ranks of one host watch each other's processes
  // Host name of the store's server: determines the address of the probe listener. Empty: unknown.
  std::string store_host = {};
  absl::Duration stall = absl::Seconds(30);  // zero: stalls are not reported
  // Whether completed collectives are recorded as ended. False for NCCL: its collectives count as
  // ended when called, and a stall means that a rank has not called what others have.
  bool sees_completion = true;
  // Whether "has died" in the backend's errors refers to ranks of this group, not of a part of it
  // (hier).
  bool names_dead = false;
  // Whether its rank numbers differ from those of the job.
  bool is_subgroup = false;
  // Whether the store ends with rank 0's process. Stop then waits on rank 0, for 1.4 s at most,
  // until the other ranks have left: otherwise they would report the end of the store as a failure.
  bool rank_0_serves_store = false;
  std::shared_ptr<const TrainingThread> training_thread = {};  // null: not known
  // Aborts the inner backend, which ends its pending calls with errors. Called by the watchdog's
  // thread, at most once.
  std::function<void()> abort = nullptr;
};

}  // namespace ddp::backends::watch
