#include "ddp/session/session.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <future>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/Parallel.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "backends/spec.h"
#include "backends/watch/training_thread.h"
#include "backends/watch/watch.h"
#include "base/environment.h"
#include "base/error_file.h"
#include "base/exit_code.h"
#include "base/option_error.h"
#include "base/process.h"
#include "base/process_limits.h"
#include "base/same_options.h"
#include "base/status.h"
#include "base/stop_signals.h"
#include "c10/core/DeviceGuard.h"
#include "ddp/collective_status.h"
#include "launchers/launcher.h"
#include "launchers/threads.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"
#include "torch/cuda.h"

namespace ddp::session {
namespace {

constexpr int kFailure = 1;

constexpr absl::Duration kEchoDelay = absl::Seconds(1);

// A group has at least as many threads: that of the store, one that works, one that watches.
constexpr int kThreadsOfGroup = 3;

// Files and sockets that a rank opens until it trains: so many for each rank of the world, and so
// many others. Rank 0 has the store's connections with all ranks. Counted with 2, 4 and 8 ranks.
constexpr std::pair<int, int> kFilesOfRank0 = {5, 12};
constexpr std::pair<int, int> kFilesOfRank = {2, 6};

// A single write, so that lines of several ranks do not mix.
void PrintError(absl::string_view message) {
  const std::string line = absl::StrCat("error: ", message, "\n");
  std::fflush(stdout);
  std::fwrite(line.data(), 1, line.size(), stderr);
  std::fflush(stderr);
}

// The N of "cuda:N".
std::optional<int> SharedGpu(absl::string_view name) {
  int index;
  if (!absl::ConsumePrefix(&name, "cuda:") || !absl::SimpleAtoi(name, &index) || index < 0) {
    return std::nullopt;
  }
  return index;
}

absl::Status CheckDeviceName(const std::string& name) {
  if (name == "auto" || name == "cpu" || name == "cuda" || SharedGpu(name)) return absl::OkStatus();
  return OptionError("device", name,
                     absl::StrCat("is no device; there are: ", absl::StrJoin(DeviceNames(), ", ")));
}

absl::StatusOr<c10::Device> ChooseDevice(const std::string& name, int local_rank) {
  if (name == "cpu") return c10::Device(c10::kCPU);
  const int devices = static_cast<int>(torch::cuda::device_count());
  if (devices == 0 && name == "auto") return c10::Device(c10::kCPU);
  if (devices == 0) {
    return OptionError(
        "device", name,
        "finds no usable GPU: this is a CPU build (build with --config=cuda), or the machine has "
        "no NVIDIA device or driver (see nvidia-smi). Use device=cpu",
        absl::StatusCode::kFailedPrecondition);
  }
  if (const std::optional<int> shared = SharedGpu(name)) {
    if (*shared < devices) return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(*shared));
    return OptionError("device", name,
                       absl::StrCat("is beyond the ", devices,
                                    " GPUs of this machine, which are "
                                    "counted from 0 (check CUDA_VISIBLE_DEVICES)"),
                       absl::StatusCode::kFailedPrecondition);
  }
  if (local_rank >= devices) {
    return absl::FailedPreconditionError(absl::StrCat(
        "local rank ", local_rank, " needs a GPU of its own, but sees ", devices,
        "; share one with device=cuda:0 and a backend other than nccl, start at most that many "
        "ranks on a machine, or let each see all GPUs (check "
        "CUDA_VISIBLE_DEVICES; with srun: --gpu-bind=none instead of --gpus-per-task)"));
  }
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(local_rank));
}

std::string TypeName(c10::Device device) { return device.is_cuda() ? "cuda" : "cpu"; }

// As far as known: of a group of the caller's own, nothing may be.
std::set<int> DeadRanks(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  std::set<int> dead;
  CatchStatus("", [&] {
    dead = backends::watch::DeadRanks(group->getDefaultBackend());
  }).IgnoreError();
  return dead;
}

// What CreateProcessGroup does so that all ranks have the same options. A device's type counts, and
// not the option: ranks of different machines may choose it by "auto", or share different GPUs.
backends::JoinCheck SameOptions(const OptionList& program_options, const launchers::Rank& rank,
                                const SessionOptions& options, c10::Device device,
                                const Explain& explain) {
  OptionList list = program_options;
  OptionRef type;
  type.path = "device";
  type.get = [device] { return TypeName(device); };
  list.Add(std::move(type));
  backends::JoinCheck check;
  check.note = DigestOfOptions(list);
  check.check = [=](const c10::intrusive_ptr<c10d::Store>& store,
                    const std::vector<std::string>& digests) -> absl::Status {
    const bool same = std::all_of(digests.begin(), digests.end(),
                                  [&](const std::string& one) { return one == digests[0]; });
    if (same) return absl::OkStatus();
    const StoreCoordinator ranks(
        {.store = c10::make_intrusive<c10d::PrefixStore>("options", store),
         .rank = rank.rank,
         .size = rank.world_size,
         .timeout = options.group.join_timeout,
         .report_after = options.group.stall,
         .announce = [explain](const absl::Status& error) { PrintError(explain(error)); }});
    return ExplainDifference(ranks, list);
  };
  return check;
}

absl::Status RunRank(const SessionOptions& options, const launchers::Rank& rank,
                     const std::function<absl::Status(const Session&)>& body,
                     const Explain& explain) {
  DDP_RETURN_IF_ERROR(ValidateAsRank(options, rank.local_rank));
  DDP_ASSIGN_OR_RETURN(const c10::Device device, ChooseDevice(options.device, rank.local_rank));
  const c10::DeviceGuard guard(device);  // current device of `body`
  // Else its launcher has divided the cores, as torchrun and `local` do.
  const Environment env = Environment::FromProcess();
  if (!env.Has("OMP_NUM_THREADS")) at::set_num_threads(launchers::ThreadsOfRank(rank, env));
  if (rank.world_size > 1) {
    // c10d and Gloo end the process if they can start some of their threads only.
    DDP_RETURN_IF_ERROR(TryThreads(kThreadsOfGroup));
    // A rank that can open no socket would wait until a timeout, as those that connect to it.
    const auto [each, others] = rank.rank == 0 ? kFilesOfRank0 : kFilesOfRank;
    DDP_RETURN_IF_ERROR(ReserveFiles(each * rank.world_size + others,
                                     absl::StrCat("as rank ", rank.rank, " of ", rank.world_size)));
  }
  SessionOptions own = options;
  const OptionList own_list = ListOptions(own);
  const OptionList& list = options.program_options ? *options.program_options : own_list;
  DDP_ASSIGN_OR_RETURN(
      backends::Group group,
      backends::CreateProcessGroup(rank, options.group, TypeName(device),
                                   SameOptions(list, rank, options, device, explain)));
  const launchers::Rank place = group.place;
  if (!rank.local_world_size_is_known && !env.Has("OMP_NUM_THREADS")) {
    at::set_num_threads(launchers::ThreadsOfRank(place, env));
  }
  if (rank.rank == 0 && !group.choice.empty()) {
    std::fprintf(stderr, "backend: %s\n", group.choice.c_str());
  }
  // libgomp starts its threads later, and ends the process, without a reason, if it cannot.
  const absl::Status threads = TryThreads(at::get_num_threads() - 1);
  if (!threads.ok()) {
    std::fprintf(stderr, "warning: rank %d: %s\n", rank.rank,
                 std::string(threads.message()).c_str());
  }
  const Session session(place, std::move(group), device, options, explain);
  absl::Status status = CatchCollective("", [&] { return body(session); });
  if (status.ok() && session.stopped_by() != 0) {
    status = EndedBy(session.stopped_by());
    if (session.is_main()) {
      std::fflush(stdout);
      std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
    }
  }
  // Rank 0 serves the store, so it must end last.
  if (status.ok() || HasEndedBySignal(status)) {
    DDP_RETURN_IF_ERROR(session.AgreeAtEnd());
    return status;
  }
  // With the exit code that the failed rank asks for, on all ranks: whichever ends first, the
  // launcher sees that one.
  return session.ShareFailure(status);
}

// For ranks on this machine: one per GPU if the options ask for GPUs and there are any.
std::optional<int> DefaultNprocHere(const SessionOptions& options) {
  const bool own_gpus = options.device == "cuda" || options.device == "auto";
  const int devices = own_gpus ? static_cast<int>(torch::cuda::device_count()) : 0;
  return devices > 0 ? std::optional<int>(devices) : std::nullopt;
}

// Whether there is a GPU for each rank that this process is about to start.
absl::Status CheckGpus(const SessionOptions& options, int nproc) {
  if (options.device == "cpu" || SharedGpu(options.device)) return absl::OkStatus();
  const int devices = static_cast<int>(torch::cuda::device_count());
  if (devices == 0 || nproc <= devices) return absl::OkStatus();
  return OptionError("launcher.nproc_per_node", absl::StrCat(nproc),
                     absl::StrCat("is more than the GPUs of this machine (", devices,
                                  "), and each rank needs one; lower it, use device=cpu, or "
                                  "share a GPU with device=cuda:0 and a backend other than nccl"));
}

absl::StatusOr<int> Launch(launchers::Launcher& launcher, launchers::LaunchOptions options,
                           int argc, char** argv) {
  options.argv.assign(argv, argv + argc);
  options.argv[0] = ExecutablePath(argv[0]);
  DDP_ASSIGN_OR_RETURN(launchers::LaunchResult result, launcher.Launch(options));
  if (!result.description.empty()) PrintError(result.description);
  return result.exit_code;
}

// Prints `mine`, unless rank 0 has announced it.
int ReportAsRank(const absl::Status& mine, const launchers::Rank& rank, const Explain& explain) {
  if (mine.ok()) return 0;
  const int code = ExitCodeIn(mine).value_or(ProblemOf(mine) ? kUsageExitCode : kFailure);
  // A collective that fails, as by a lost connection, is usually a consequence of another rank's
  // failure. Wait, so that that rank ends first, and its message and exit code count; a launcher
  // that ends the job on failure then suppresses this one.
  const bool is_echo = !WasAnnounced(mine) && (absl::IsUnavailable(mine) || IsFromCollective(mine));
  if (is_echo) absl::SleepFor(kEchoDelay);
  const std::string message = explain(mine);
  WriteErrorFile(Environment::FromProcess(), {.message = message, .exit_code = code});
  if (WasAnnounced(mine) || HasEndedBySignal(mine)) return code;
  const bool says_who = rank.world_size == 1 || NamesItsRank(message);
  PrintError(says_who ? message : absl::StrCat("rank ", rank.rank, ": ", message));
  return code;
}

// How the failure of one rank reaches ranks that wait for it in a collective
// (Session::ShareFailure): without a failure there is no communication. The failed rank sets a key
// in the store, aborts the process group and calls Agree. The other ranks' collectives then fail;
// these ranks find the key and call Agree, too, unless they are in a Coordinator call already.

// In the store once a rank has failed by itself.
constexpr char kFailureKey[] = "session/a_rank_has_failed";

// Maximum wait for the store, whose host may be gone: TCP notices that only much later.
constexpr std::chrono::seconds kStorePatience{3};

// Maximum wait of a failed rank for ranks that neither communicate nor end. Then it ends, and its
// launcher ends the job.
constexpr absl::Duration kRanksPatience = absl::Seconds(10);

bool AnyRankHasFailed(const c10::intrusive_ptr<c10d::Store>& store) {
  auto found = std::make_shared<std::promise<bool>>();
  std::future<bool> answer = found->get_future();
  const auto look = [store, found] {
    bool has_failed = false;
    CatchStatus("", [&] { has_failed = store->check({kFailureKey}); }).IgnoreError();
    found->set_value(has_failed);
  };
  // This rank's error may be that no thread can be started.
  if (!CatchStatus("", [&] { std::thread(look).detach(); }).ok()) return false;
  return answer.wait_for(kStorePatience) == std::future_status::ready && answer.get();
}

void StopOtherRanks(c10d::Store& store, c10d::ProcessGroup& process_group) {
  CatchStatus("", [&] {
    store.set(kFailureKey, std::vector<uint8_t>{1});
    // `set` is not acknowledged. The check ensures that the key is there before others see the
    // abort.
    store.check({kFailureKey});
  }).IgnoreError();
  CatchStatus("", [&] { process_group.abort(); }).IgnoreError();
}

}  // namespace

Session::Session(launchers::Rank rank, backends::Group group, c10::Device device,
                 const SessionOptions& options, const Explain& explain)
    : place_(std::move(rank)),
      group_(std::move(group)),
      device_(device),
      work_timeout_(options.work_timeout),
      stall_(options.group.stall),
      ranks_({.store = group_.store
                           ? c10::make_intrusive<c10d::PrefixStore>("session", group_.store)
                           : c10::intrusive_ptr<c10d::PrefixStore>(),
              .rank = place_.rank,
              .size = place_.world_size,
              .timeout = options.work_timeout,
              .report_after = options.group.stall,
              .report = nullptr,
              .dead_ranks = [group = group_.process_group] { return DeadRanks(group); },
              .announce =
                  [explain](const absl::Status& error) {
                    PrintError(explain ? explain(error) : std::string(error.message()));
                  },
              .on_round =
                  [thread = group_.training_thread](int64_t round, bool begins) {
                    if (thread == nullptr) return;
                    begins ? thread->BeginRound(round) : thread->EndRound();
                  }}) {}

absl::Status Session::Agree(const absl::Status& mine) const {
  return ranks_.Agree(ExplainThreadLimits(mine));
}

absl::Status Session::AgreeAtEnd() const {
  if (group_.training_thread != nullptr) group_.training_thread->EndWork();
  return ranks_.AgreeAtEnd(absl::OkStatus());
}

absl::StatusOr<std::string> Session::Broadcast(const absl::StatusOr<std::string>& value) const {
  return ranks_.Broadcast(value);
}

absl::StatusOr<std::vector<std::string>> Session::AllGather(const std::string& mine) const {
  return ranks_.AllGather(mine);
}

absl::StatusOr<std::vector<std::string>> Session::Gather(const std::string& mine) const {
  return ranks_.Gather(mine);
}

absl::StatusOr<std::unique_ptr<Coordinator>> Session::ForThread(
    std::function<bool()> gives_up) const {
  if (size() == 1) return std::make_unique<SingleRank>();
  c10::intrusive_ptr<c10d::Store> store;
  DDP_RETURN_IF_ERROR(CatchStatus("connecting another thread to the rendezvous store", [&] {
    store = c10::make_intrusive<c10d::PrefixStore>(absl::StrCat("session/thread/", ++threads_),
                                                   group_.store->clone());
  }));
  return std::make_unique<StoreCoordinator>(StoreCoordinatorOptions{
      .store = std::move(store),
      .rank = rank(),
      .size = size(),
      .timeout = work_timeout_,
      .report_after = absl::ZeroDuration(),
      .dead_ranks = [group = group_.process_group] { return DeadRanks(group); },
      .gives_up = std::move(gives_up)});
}

absl::Status Session::ShareFailure(const absl::Status& error) const {
  if (error.ok() || !group_.store) return error;
  if (IsFromCoordinator(error)) return error;
  const absl::Status mine = ExplainThreadLimits(error);
  // Some ranks are in a Coordinator call, or about to: they get this error there. The watchdogs
  // have aborted the group on all.
  if (absl::StrContains(mine.message(), backends::watch::kWaitForEachOther)) {
    return ranks_.AgreeOnFailure(mine, kRanksPatience);
  }
  const bool from_collective = IsFromCollective(mine);
  // The codes of failed communication, for bodies that do not use CatchCollective.
  if (from_collective || absl::IsUnavailable(mine) || absl::IsDeadlineExceeded(mine)) {
    if (AnyRankHasFailed(group_.store)) {
      // Some rank may be dead, or work alone.
      absl::Status cause = ranks_.AgreeOnFailure(absl::OkStatus(), kRanksPatience);
      return WasAnnounced(cause) ? cause : mine;
    }
    if (from_collective) return mine;
  }
  StopOtherRanks(*group_.store, *group_.process_group);
  return ranks_.AgreeOnFailure(mine, kRanksPatience);
}

std::vector<std::string> DeviceNames() { return {"auto", "cpu", "cuda", "cuda:N"}; }

absl::Status ValidateAsLauncher(const SessionOptions& options) {
  DDP_RETURN_IF_ERROR(ValidateOptions(options));
  return CheckDeviceName(options.device);
}

absl::Status ValidateAsRank(const SessionOptions& options, int local_rank) {
  DDP_RETURN_IF_ERROR(ValidateAsLauncher(options));
  // First, since the message of an unavailable backend is more specific than that of a missing
  // device.
  DDP_RETURN_IF_ERROR(backends::CheckAvailable(options.group.backend));
  DDP_ASSIGN_OR_RETURN(const c10::Device device, ChooseDevice(options.device, local_rank));
  return backends::Validate(options.group, TypeName(device));
}

int Run(const SessionOptions& options, int argc, char** argv,
        const std::function<absl::Status(const Session&)>& body, const Explain& explain) {
  // A run outlives the reader of what it prints, such as `head`.
  IgnoreBrokenPipes();
  const Explain message =
      explain ? explain : [](const absl::Status& status) { return std::string(status.message()); };
  const Environment env = Environment::FromProcess();
  const auto end_with = [&](const RankError& error) {
    PrintError(error.message);
    WriteErrorFile(env, error);
    return error.exit_code;
  };
  const auto fail = [&](const absl::Status& status) {
    // A launcher's variables are given by the user, as options are.
    const bool is_usage = ProblemOf(status) || absl::IsInvalidArgument(status);
    return end_with({message(status), is_usage ? kUsageExitCode : kFailure});
  };
  if (absl::Status valid = ValidateAsLauncher(options); !valid.ok()) return fail(valid);

  // Choose the role first: what must be available depends on it.
  launchers::LaunchOptions launch = options.launcher;
  launch.default_nproc_here = DefaultNprocHere(options);
  absl::StatusOr<launchers::Choice> choice = launchers::Choose(launch, env);
  if (!choice.ok()) return fail(choice.status());
  if (choice->announce) std::fprintf(stderr, "launcher %s\n", choice->reason.c_str());

  if (choice->rank) {
    const launchers::Rank& rank = *choice->rank;
    // torchrun repeats any failure. One that would come again must not be taken for a run of ours
    // that has come to its first checkpoint and goes on from it.
    if (const auto before = PreviousError(env, rank.restart_count);
        before && WillRepeat(before->exit_code)) {
      return end_with(*before);
    }
    const absl::Status mine =
        CatchStatus("", [&] { return RunRank(options, rank, body, message); });
    return ReportAsRank(ExplainThreadLimits(mine), rank, message);
  }
  if (choice->launcher->StartsRanksHere()) {
    // Fail here with one message instead of one from each rank.
    const absl::Status valid = CatchStatus("", [&] {
      DDP_RETURN_IF_ERROR(ValidateAsRank(options));
      return CheckGpus(options, launch.NprocHere());
    });
    if (!valid.ok()) return fail(valid);
  }
  const absl::StatusOr<int> code = Launch(*choice->launcher, launch, argc, argv);
  return code.ok() ? *code : fail(code.status());
}

}  // namespace ddp::session
