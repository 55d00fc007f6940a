#include "backends/mpi/runtime.h"

#include <mpi.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/log/absl_log.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "backends/mpi/mpi_group.h"
#include "base/environment.h"
#include "base/status.h"

namespace ddp::backends::mpi {
namespace {

// How the progress thread waits for MPI, which has no blocking call for this: first it polls, then
// it yields between polls, then it sleeps for a fraction of the time waited so far, so that a wait
// takes longer by at most that fraction.
constexpr absl::Duration kSpin = absl::Microseconds(5);
constexpr absl::Duration kYield = absl::Microseconds(100);
constexpr int kSleepFraction = 8;
constexpr absl::Duration kLongestSleep = absl::Microseconds(500);
// Interval of polling while only abandoned requests are pending.
constexpr absl::Duration kAbandonedSleep = absl::Milliseconds(10);
constexpr absl::Duration kAbandonedGrace = absl::Seconds(2);
// Maximum time in which the progress thread notices that the process is exiting.
constexpr absl::Duration kLeaveTimeout = absl::Seconds(1);
// A poll that took longer has transferred data.
constexpr absl::Duration kIdleRound = absl::Microseconds(5);

bool ProgramHasInitialized() {
  int initialized = 0;
  MPI_Initialized(&initialized);
  return initialized != 0;
}

}  // namespace

absl::Status StartedByMpirun() {
  const Environment env = Environment::FromProcess();
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK",
                           "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE"}) {
    if (env.Has(name)) return absl::OkStatus();
  }
  if (ProgramHasInitialized()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "backend mpi: no mpirun has started this process; start with `mpirun -n N PROGRAM "
      "backend=mpi …` (or srun --mpi=pmix), or use backend=gloo");
}

std::string LibraryVersion() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(text, &length);
  return std::string(
      text, std::find_if(text, text + length, [](char c) { return c == ',' || c == '\n'; }));
}

absl::StatusOr<Runtime*> Runtime::Start(absl::Duration timeout) {
  DDP_RETURN_IF_ERROR(StartedByMpirun());
  // Never destroyed: MPI can be initialised only once per process.
  static Runtime* const runtime = [] {
    auto* made = new Runtime();
    std::thread([made] { made->Main(); }).detach();
    return made;
  }();
  std::unique_lock lock(runtime->mutex_);
  if (!runtime->wake_callers_.wait_for(lock, absl::ToChronoNanoseconds(timeout),
                                       [] { return runtime->initialized_; })) {
    return absl::DeadlineExceededError(
        absl::StrCat("Timed out after ", absl::FormatDuration(timeout),
                     ": MPI_Init_thread has not returned; not all ranks of the mpirun have called "
                     "it"));
  }
  DDP_RETURN_IF_ERROR(runtime->init_status_);
  return runtime;
}

absl::Status Runtime::Initialize() {
  int level = MPI_THREAD_SINGLE;
  owns_mpi_ = !ProgramHasInitialized();
  if (owns_mpi_) {
    DDP_RETURN_IF_ERROR(MpiStatus(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level),
                                  "MPI_Init_thread"));
    if (level < MPI_THREAD_FUNNELED) {
      return absl::FailedPreconditionError(
          "this MPI was built without threads (MPI_THREAD_SINGLE); use another, or backend=gloo");
    }
  } else {
    DDP_RETURN_IF_ERROR(MpiStatus(MPI_Query_thread(&level), "MPI_Query_thread"));
    if (level < MPI_THREAD_MULTIPLE) {
      return absl::FailedPreconditionError(
          "the program has initialised MPI itself; for the backend mpi to work beside it, it must "
          "do so by MPI_Init_thread with MPI_THREAD_MULTIPLE");
    }
  }
  // Errors are returned as codes, also for communicators derived from these.
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
  void* max_tag = nullptr;
  int found = 0;
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &max_tag, &found);
  if (found != 0) max_tag_ = *static_cast<int*>(max_tag);
  DDP_RETURN_IF_ERROR(MpiStatus(MPI_Comm_rank(MPI_COMM_WORLD, &world_rank_), "MPI_Comm_rank"));
  return MpiStatus(MPI_Comm_size(MPI_COMM_WORLD, &world_size_), "MPI_Comm_size");
}

void Runtime::Main() {
  prctl(PR_SET_NAME, "ddp_mpi");
  prctl(PR_SET_TIMERSLACK, 1000);  // nanoseconds; by default a short sleep lasts 50 µs longer
  const absl::Status status = Initialize();
  {
    std::lock_guard lock(mutex_);
    progress_thread_ = std::this_thread::get_id();
    init_status_ = status;
    initialized_ = true;
    // on_exit is a glibc function; an atexit handler does not get the exit status.
    if (status.ok() && owns_mpi_) on_exit(&AtExit, this);
  }
  wake_callers_.notify_all();
  if (!status.ok()) return;

  absl::Time active = absl::Now();
  for (;;) {
    const absl::Time start = absl::Now();
    const absl::Duration idle = start - active;
    if (running_.empty()) {
      TakeCommands(absl::InfiniteDuration());
    } else if (OnlyAbandoned()) {
      TakeCommands(kAbandonedSleep);
    } else if (idle > kYield) {
      TakeCommands(std::min(idle / kSleepFraction, kLongestSleep));
    } else {
      TakeCommands(absl::ZeroDuration());
      if (idle > kSpin) sched_yield();
    }
    const absl::Time asked = absl::Now();
    if (Poll() || absl::Now() - asked > kIdleRound) active = absl::Now();

    if (!MayEnd()) continue;
    if (ending_ == Ending::kFinalize) MPI_Finalize();
    {
      std::lock_guard lock(mutex_);
      ended_ = true;
    }
    wake_callers_.notify_all();
    return;
  }
}

bool Runtime::MayEnd() {
  if (ending_ == Ending::kNot) return false;
  if (ending_ == Ending::kLeave) return true;
  std::lock_guard lock(mutex_);
  if (!commands_.empty() || !OnlyAbandoned()) return false;
  // Messages of abandoned operations may still be received; otherwise MPI discards them.
  if (given_up_ == absl::InfinitePast()) given_up_ = absl::Now();
  return running_.empty() || absl::Now() - given_up_ > kAbandonedGrace;
}

bool Runtime::OnlyAbandoned() const {
  return std::all_of(running_.begin(), running_.end(),
                     [](const std::unique_ptr<Running>& running) { return running->reported; });
}

void Runtime::TakeCommands(absl::Duration patience) {
  if (patience == absl::ZeroDuration() && !has_commands_.load(std::memory_order_acquire)) return;
  std::vector<std::function<void()>> commands;
  {
    std::unique_lock lock(mutex_);
    const auto called = [this] { return !commands_.empty() || ending_ != Ending::kNot; };
    if (patience == absl::InfiniteDuration()) {
      wake_progress_.wait(lock, called);
    } else if (patience > absl::ZeroDuration()) {
      wake_progress_.wait_for(lock, absl::ToChronoNanoseconds(patience), called);
    }
    commands.swap(commands_);
    has_commands_.store(false, std::memory_order_relaxed);
  }
  for (const std::function<void()>& command : commands) command();
}

bool Runtime::Poll() {
  const absl::Time now = absl::Now();
  bool progress = false;
  awaited_.clear();
  for (auto it = running_.begin(); it != running_.end();) {
    Running& running = **it;
    if (running.reported) {
      if (running.channel.requests.Idle()) {
        it = running_.erase(it);
      } else {
        ++it;
      }
      continue;
    }
    if (!running.coroutine.Advance()) {
      if (now > running.deadline) Expire(running);
      running.channel.requests.AppendAwaited(awaited_);
      ++it;
      continue;
    }
    progress = true;
    const absl::Status status = running.coroutine.status();
    if (!status.ok()) {
      Abandon(running);
      ++it;
      running.group->Finish(running.operation, status, /*source=*/-1);
      continue;
    }
    // Removed first, because Finish starts the group's next collective.
    const std::unique_ptr<Running> ended = std::move(*it);
    it = running_.erase(it);
    ended->group->Finish(ended->operation, status, ended->channel.requests.source());
  }
  return progress;
}

void Runtime::Launch(std::shared_ptr<MpiGroup> group, Operation operation) {
  auto running = std::make_unique<Running>();
  running->channel.comm = operation.is_collective ? group->collectives_ : group->messages_;
  running->channel.rank = group->rank();
  running->channel.size = group->size();
  running->channel.tag = operation.is_collective ? group->NextTag(operation.signature) : 0;
  running->channel.scratch = &group->scratch_;
  running->channel.requests.LeaveTo(&awaited_);
  running->deadline = absl::Now() + operation.timeout;
  running->coroutine = operation.body(running->channel);
  running->operation = std::move(operation);
  running->group = std::move(group);
  running_.push_back(std::move(running));
}

void Runtime::Expire(Running& running) {
  const std::shared_ptr<MpiGroup> group = running.group;
  std::string who;
  if (running.operation.on_timeout != nullptr) {
    who = running.operation.on_timeout(running.channel);
  } else {
    const std::vector<int> missing = running.channel.requests.MissingPeers();
    who = missing.empty()
              ? "MPI does not say for which rank"
              : absl::StrCat("nothing has come from ",
                             absl::StrJoin(missing, ", ", [&](std::string* out, int peer) {
                               absl::StrAppend(out, group->NameOf(peer));
                             }));
  }
  Abandon(running);
  group->Finish(
      running.operation,
      absl::DeadlineExceededError(absl::StrCat(
          "Timed out after ", absl::FormatDuration(running.operation.timeout), "; ", who)),
      /*source=*/-1);
}

void Runtime::Abandon(Running& running) {
  running.reported = true;
  running.channel.requests.AbandonReceives();
}

absl::Status Runtime::Call(const std::function<absl::Status()>& call) {
  absl::Status result;
  bool done = false;
  Post([&] {
    absl::Status status = call();
    std::lock_guard lock(mutex_);
    result = std::move(status);
    done = true;
    wake_callers_.notify_all();
  });
  std::unique_lock lock(mutex_);
  wake_callers_.wait(lock, [&] { return done || ended_; });
  return done ? result : absl::UnavailableError("the process is exiting, and has left MPI");
}

void Runtime::Post(std::function<void()> call) {
  {
    std::lock_guard lock(mutex_);
    commands_.push_back(std::move(call));
    has_commands_.store(true, std::memory_order_release);
  }
  wake_progress_.notify_one();
}

void Runtime::WaitAtExit(absl::Duration timeout) {
  std::lock_guard lock(mutex_);
  exit_timeout_ = std::max(exit_timeout_, timeout);
}

void Runtime::AtExit(int exit_status, void* runtime) {
  static_cast<Runtime*>(runtime)->End(exit_status == 0 ? Ending::kFinalize : Ending::kLeave);
}

void Runtime::End(Ending how) {
  if (std::this_thread::get_id() == progress_thread_) return;  // exit() was called in a callback
  std::unique_lock lock(mutex_);
  ending_ = how;
  wake_progress_.notify_one();
  const absl::Duration timeout = how == Ending::kFinalize ? exit_timeout_ : kLeaveTimeout;
  if (wake_callers_.wait_for(lock, absl::ToChronoNanoseconds(timeout), [this] { return ended_; }) ||
      how == Ending::kLeave) {
    return;
  }
  ABSL_LOG(ERROR) << "rank " << world_rank_ << " has ended, and waited "
                  << absl::FormatDuration(timeout)
                  << " for the others in MPI_Finalize; it leaves, and mpirun will end them";
}

}  // namespace ddp::backends::mpi
