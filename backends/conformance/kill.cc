#include "backends/conformance/kill.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <random>
#include <set>
#include <utility>

#include "ATen/Parallel.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "backends/conformance/fuzz.h"
#include "backends/conformance/processes.h"
#include "backends/conformance/start.h"
#include "backends/conformance/traits.h"
#include "backends/process_group.h"
#include "backends/watch/probe.h"
#include "base/status.h"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"

namespace ddp::backends::conformance {
namespace {

constexpr int64_t kSecond = 1'000'000'000;
// Long enough for a loaded machine, and far above any max_detection_time.
constexpr int64_t kPatience = 60 * kSecond;
// Above any max_detection_time: a survivor that fails only by this timeout fails the round.
constexpr absl::Duration kGroupTimeout = absl::Seconds(30);
constexpr int kGo = -1;  // command; any other is the rank that died, without which to go on

struct Round {
  int number;
  uint64_t seed;
  int world_size;
  int victim;
  std::optional<Op> op;
  // The step before which the victim kills itself; nullopt: the parent does, after a while.
  std::optional<int64_t> exit_step;
  absl::Duration delay;
};

Round MakeRound(const KillOptions& options, int number) {
  std::mt19937_64 random(options.seed * 1'000'003 + number);
  Round round;
  round.number = number;
  round.seed = options.seed * 1'000'003 + number;
  round.world_size = 2 + static_cast<int>(random() % 3);
  round.victim = static_cast<int>(random() % round.world_size);
  round.op = options.op;
  if (!options.op && number % 2 == 0) round.op = AllOps()[(number / 2) % AllOps().size()];
  if (random() % 4 == 0) round.exit_step = random() % 20;
  round.delay = absl::Microseconds(random() % 20'000);
  return round;
}

// A store that outlives the ranks, as torchrun's agent serves it. It has a process of its own,
// because this one must stay without threads.
class StoreProcess {
 public:
  StoreProcess()
      : process_(1, [](int, Child& child) {
          c10d::TCPStoreOptions options;
          options.port = 0;
          options.isServer = true;
          options.waitWorkers = false;
          auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
          child.Tell("port", absl::StrCat(store->getPort()));
          return child.Command();
        }) {
    if (auto event = process_.Next(MonotonicNanoseconds() + kPatience)) port_ = atoi(event->text);
  }

  int port() const { return port_; }

 private:
  Processes process_;
  int port_ = 0;
};

absl::StatusOr<Group> JoinGroup(const std::string& backend, int port, const std::string& run_id,
                                int rank, int world_size) {
  launchers::Rank self;
  self.rank = self.local_rank = rank;
  self.world_size = self.local_world_size = world_size;
  self.master_port = port;
  self.master_is_external = true;
  self.run_id = run_id;
  return CreateProcessGroup(self, {.backend = backend, .timeout = kGroupTimeout});
}

// One step on a backend: nothing is in flight afterwards.
absl::Status RunStep(c10d::Backend& backend, const Traits& traits, const Round& round,
                     int64_t step) {
  Case c;
  int64_t attempt = step * 1000;
  do {
    c = FuzzCase(traits, backend.getSize(), round.seed, attempt++, /*max_count=*/1 << 15);
    c.scope = Scope::kWorld;
    if (round.op) c.op = *round.op;
  } while (!IsMeaningful(c) || FindGap(traits, c) != nullptr);
  return CatchStatus(
      Name(c.op), [&] { return Running(backend, traits, c, (round.seed << 20) + step).Finish(); });
}

// Descriptors that were not there `before` and stay; a backend's threads may still be closing some.
std::vector<std::string> LeftOpen(const std::multiset<std::string>& before) {
  std::vector<std::string> left;
  const absl::Time deadline = absl::Now() + absl::Seconds(5);
  do {
    left.clear();
    for (const std::string& descriptor : Descriptors()) {
      if (before.count(descriptor) == 0) left.push_back(descriptor);
    }
    if (!left.empty()) absl::SleepFor(absl::Milliseconds(10));
  } while (!left.empty() && absl::Now() < deadline);
  return left;
}

// Another user than any other rank, which makes for a host of its own.
absl::Status BecomeUser(int rank) {
  constexpr int kFirstUser = 64'000;
  if (setuid(kFirstUser + rank) != 0) return absl::ErrnoToStatus(errno, "setuid: only root can");
  // Stays open as long as the process exists: must not count as a leaked descriptor.
  if (watch::ProbeListener::OfThisProcess("127.0.0.1") == nullptr) {
    return absl::UnavailableError("cannot open a probe listener");
  }
  return absl::OkStatus();
}

// Runs a rank. Returns 0 on success.
int RunRank(const KillOptions& options, const Round& round, int port, int rank, Child& child) {
  at::set_num_threads(1);
  const Traits& traits = TraitsOf(options.backend);
  if (const absl::Status user = options.separate_hosts ? BecomeUser(rank) : absl::OkStatus();
      !user.ok()) {
    child.Tell("unjoined", user.ToString());
    return 1;
  }
  const std::multiset<std::string> before = Descriptors();
  const std::string run_id = absl::StrCat("round", round.number);
  absl::Status status;
  {
    absl::StatusOr<Group> group = JoinGroup(options.backend, port, run_id, rank, round.world_size);
    if (!group.ok()) {
      child.Tell("unjoined", group.status().ToString());
      return 1;
    }
    if (options.separate_hosts) absl::SleepFor(absl::Seconds(0.5));
    child.Tell("joined");
    child.Command();
    auto backend = group->process_group->getBackend(c10::kCPU);
    for (int64_t step = 0; status.ok(); ++step) {
      if (rank == round.victim && round.exit_step == step) {
        child.Tell("exiting");
        raise(SIGKILL);
      }
      status = RunStep(*backend, traits, round, step);
    }
    child.Tell(absl::IsDataLoss(status) ? "wrong" : "failed", status.ToString());
    backend->abort();
  }
  if (absl::IsDataLoss(status)) return 1;

  const int dead = child.Command();
  const int survivors = round.world_size - 1;
  status = absl::OkStatus();
  if (survivors > 1) {
    const int new_rank = rank - (rank > dead ? 1 : 0);
    // The new group is of the same job and uses the same store, as in a program.
    absl::StatusOr<Group> group = JoinGroup(options.backend, port, run_id, new_rank, survivors);
    status = group.status();
    for (int64_t step = 0; status.ok() && step < 5; ++step) {
      auto backend = group->process_group->getBackend(c10::kCPU);
      status = RunStep(*backend, traits, round, step);
    }
    if (status.ok()) {
      // Nobody leaves while others are at work.
      status = CatchStatus("", [&] { group->process_group->barrier()->wait(); });
    }
  }
  if (!status.ok()) {
    child.Tell("unrecovered", status.ToString());
    return 1;
  }
  child.Tell("recovered", absl::StrJoin(LeftOpen(before), ", "));
  return 0;
}

class RoundRunner {
 public:
  RoundRunner(const KillOptions& options, const Round& round, int port)
      : options_(options), round_(round), ranks_(round.world_size, [&](int rank, Child& child) {
          return RunRank(options, round, port, rank, child);
        }) {}

  // What went wrong; empty if nothing.
  std::string Run(std::vector<absl::Duration>& delays) {
    const int64_t deadline = MonotonicNanoseconds() + kPatience;
    if (!Await("joined", round_.world_size, deadline)) return Describe("did not all join");
    for (int rank = 0; rank < round_.world_size; ++rank) ranks_.Command(rank, kGo);
    if (round_.exit_step) {
      if (!Await("exiting", 1, deadline)) return Describe("the victim did not get to its step");
    } else {
      timespec delay = absl::ToTimespec(round_.delay);
      nanosleep(&delay, nullptr);
    }
    const int64_t killed = MonotonicNanoseconds();
    ranks_.Kill(round_.victim);

    const int survivors = round_.world_size - 1;
    if (!Await("failed", survivors, killed + kPatience)) return Describe("no error in time");
    for (const Event& event : events_) {
      if (absl::string_view(event.kind) != "failed" || event.rank == round_.victim) continue;
      if (event.at_ns < killed && !round_.exit_step) return Describe("an error before the death");
      const absl::Duration delay = absl::Nanoseconds(std::max<int64_t>(0, event.at_ns - killed));
      delays.push_back(delay);
      if (delay > options_.max_detection_time) {
        return Describe(
            absl::StrCat("rank ", event.rank, " noticed after ", absl::FormatDuration(delay)));
      }
      if (!NamesVictim(event.text)) {
        return Describe(absl::StrCat("rank ", event.rank, " does not name the dead one"));
      }
      // The error has the words that PyTorch's users look for.
      if (!absl::StrContains(event.text, "Connection closed")) {
        return Describe(absl::StrCat("rank ", event.rank, " does not say \"Connection closed\""));
      }
    }

    for (int rank = 0; rank < round_.world_size; ++rank) {
      if (rank != round_.victim) ranks_.Command(rank, round_.victim);
    }
    if (!Await("recovered", survivors, MonotonicNanoseconds() + kPatience)) {
      return Describe("no new group");
    }
    const absl::Status ended = ranks_.Wait(MonotonicNanoseconds() + kPatience);
    if (!ended.ok()) return Describe(std::string(ended.message()));
    for (const Event& event : events_) {
      if (TraitsOf(options_.backend).closes_at_once &&
          absl::string_view(event.kind) == "recovered" && event.text[0] != '\0') {
        return Describe(absl::StrCat("rank ", event.rank, " has left open: ", event.text));
      }
    }
    return "";
  }

 private:
  // Whether `count` events of this kind come, and nothing that must not.
  bool Await(absl::string_view kind, int count, int64_t deadline) {
    const auto have = [&] {
      return std::count_if(events_.begin(), events_.end(),
                           [&](const Event& event) { return event.kind == kind; });
    };
    while (have() < count) {
      std::optional<Event> event = ranks_.Next(deadline);
      if (!event) return false;
      events_.push_back(*event);
      const absl::string_view said = event->kind;
      if (said == "wrong" || said == "unjoined" || said == "unrecovered") return false;
    }
    return true;
  }

  bool NamesVictim(absl::string_view text) const {
    if (absl::StrContains(text, absl::StrCat("rank ", round_.victim))) return true;
    // Gloo's monitored barrier lists "Ranks 2, 3" on rank 0, to which it refers the others.
    if (absl::StrContains(text, "check rank 0 logs for faulty rank")) return true;
    const size_t end = text.find(" failed to pass monitoredBarrier");
    const size_t begin = text.find("Ranks ");
    if (begin > end || end == absl::string_view::npos) return false;
    const std::vector<std::string> ranks =
        absl::StrSplit(text.substr(begin + 6, end - begin - 6), ", ");
    return std::find(ranks.begin(), ranks.end(), absl::StrCat(round_.victim)) != ranks.end();
  }

  std::string Describe(absl::string_view what) {
    std::string text = absl::StrCat("round ", round_.number, ", seed ", options_.seed, ": ", what,
                                    "; rank ", round_.victim, " of ", round_.world_size);
    absl::StrAppend(&text, round_.exit_step ? absl::StrCat(" died before step ", *round_.exit_step)
                                            : absl::StrCat(" killed after ",
                                                           absl::FormatDuration(round_.delay)));
    absl::StrAppend(&text, " in ", round_.op ? Name(*round_.op) : "a mix");
    for (const Event& event : events_) {
      absl::StrAppend(&text, "\n    rank ", event.rank, " ", event.kind, ": ", event.text);
    }
    for (int rank = 0; rank < round_.world_size; ++rank) {
      const std::string end = ranks_.HowItEnded(rank);
      if (!end.empty()) absl::StrAppend(&text, "\n    rank ", rank, " ended with ", end);
    }
    return text;
  }

  const KillOptions& options_;
  const Round round_;
  Processes ranks_;
  std::vector<Event> events_;
};

}  // namespace

KillReport RunKills(const KillOptions& options) {
  KillReport report;
  std::vector<absl::Duration> delays;
  const std::set<std::string> before = SharedMemoryNames();
  AdoptOrphans();
  {
    StoreProcess store;
    for (int number = 0; number < options.kills && report.failures.size() < 10; ++number) {
      const Round round = MakeRound(options, number);
      const std::string failure = RoundRunner(options, round, store.port()).Run(delays);
      if (!failure.empty()) report.failures.push_back(failure);
      ++report.kills;
    }
  }
  if (HasChildren()) report.failures.push_back("left behind: a process");
  for (const std::string& name : LeftBehind(before)) {
    report.failures.push_back(absl::StrCat("left behind: ", name));
  }
  std::sort(delays.begin(), delays.end());
  report.errors = static_cast<int>(delays.size());
  if (!delays.empty()) {
    report.median = delays[delays.size() / 2];
    report.slowest = delays.back();
  }
  return report;
}

std::string Summary(const KillReport& report) {
  return absl::StrCat(report.kills, " kills, ", report.errors, " errors of survivors after ",
                      absl::FormatDuration(report.median), " (median), ",
                      absl::FormatDuration(report.slowest), " (slowest); ", report.failures.size(),
                      " failures");
}

}  // namespace ddp::backends::conformance
