#include "ddp/trainer/session.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <thread>
#include <vector>

#include "ATen/Parallel.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "backends/spec.h"
#include "base/cores.h"
#include "base/environment.h"
#include "base/status.h"
#include "c10/core/DeviceGuard.h"
#include "launchers/launcher.h"
#include "torch/cuda.h"

namespace ddp::trainer {
namespace {

constexpr int kFailure = 1;

constexpr absl::Duration kEchoDelay = absl::Seconds(1);

// Marks an error that rank 0 has printed for all.
constexpr absl::string_view kReported = "libtorch_ddp/reported";

// One write, so that lines of several ranks do not mix.
void PrintError(absl::string_view message) {
  const std::string line = absl::StrCat("error: ", message, "\n");
  std::fflush(stdout);
  std::fwrite(line.data(), 1, line.size(), stderr);
  std::fflush(stderr);
}

std::vector<uint8_t> Bytes(absl::string_view text) { return {text.begin(), text.end()}; }

std::string Text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

// The path of this program, for starting copies: argv[0] may be relative to a folder left since.
std::string ProgramPath(const char* argv0) {
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof(path));
  return length > 0 ? std::string(path, length) : std::string(argv0);
}

absl::StatusOr<c10::Device> ChooseDevice(const std::string& name, int local_rank) {
  if (name == "cpu") return c10::Device(c10::kCPU);
  if (name != "cuda" && name != "auto") {
    return absl::InvalidArgumentError(
        absl::StrCat("--device='", name, "' is none of cpu, cuda, auto"));
  }
  const int devices = static_cast<int>(torch::cuda::device_count());
  if (devices == 0 && name == "auto") return c10::Device(c10::kCPU);
  if (devices == 0) {
    return absl::FailedPreconditionError(
        "--device=cuda: no usable GPU; this is a CPU build (build with --config=cuda), or the "
        "machine has no NVIDIA device or driver (see nvidia-smi). Use --device=cpu");
  }
  if (local_rank >= devices) {
    return absl::FailedPreconditionError(
        absl::StrCat("local rank ", local_rank, " needs a GPU of its own, but this machine has ",
                     devices, "; lower --nproc_per_node"));
  }
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(local_rank));
}

// Ranks share the machine's cores. A launcher that binds each rank to cores of its own, or sets
// OMP_NUM_THREADS as torchrun and our local launcher do, has decided already.
void LimitThreads(const launchers::Rank& rank, const Environment& env) {
  if (env.Has("OMP_NUM_THREADS")) return;
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof(mask), &mask) != 0) return;
  const bool bound = CPU_COUNT(&mask) < static_cast<int>(std::thread::hardware_concurrency());
  const int cores = AvailableCores();
  at::set_num_threads(std::max(1, bound ? cores : cores / rank.local_world_size));
}

backends::GroupOptions GroupOptionsOf(const SessionOptions& options, c10::Device device) {
  backends::GroupOptions group;
  group.backend = options.backend;
  group.device_type = device.is_cuda() ? "cuda" : "cpu";
  group.timeout = options.timeout;
  group.join_timeout = options.join_timeout;
  group.interface = options.interface;
  group.hostname = options.hostname;
  group.shm = options.shm;
  group.nccl = options.nccl;
  group.stall = options.stall;
  return group;
}

absl::Status RunRank(const SessionOptions& options, const launchers::Rank& rank,
                     const std::function<absl::Status(const Session&)>& body) {
  DDP_ASSIGN_OR_RETURN(c10::Device device, ChooseDevice(options.device, rank.local_rank));
  const c10::DeviceGuard guard(device);  // what body makes without saying where
  LimitThreads(rank, Environment::FromProcess());
  backends::GroupOptions group_options = GroupOptionsOf(options, device);
  group_options.rank = rank;
  DDP_ASSIGN_OR_RETURN(backends::Group group, backends::CreateProcessGroup(group_options));
  if (rank.rank == 0 && !group.choice.empty()) {
    std::fprintf(stderr, "backend: %s\n", group.choice.c_str());
  }

  Session session(rank, std::move(group), device);
  DDP_RETURN_IF_ERROR(body(session));
  // Rank 0 serves the store and so leaves last.
  return session.Agree(absl::OkStatus());
}

absl::StatusOr<int> Launch(launchers::Launcher& launcher, const SessionOptions& options, int argc,
                           char** argv) {
  launchers::LaunchRequest request;
  request.argv.assign(argv, argv + argc);
  request.argv[0] = ProgramPath(argv[0]);
  request.nproc_per_node = options.nproc_per_node.value_or(options.default_nproc_per_node);
  DDP_ASSIGN_OR_RETURN(launchers::LaunchResult result, launcher.Launch(request));
  if (result.exit_code != 0) PrintError(result.description);
  return result.exit_code;
}

}  // namespace

absl::Status Session::Agree(const absl::Status& mine) const {
  if (rank.world_size == 1) return mine;
  const std::string prefix = absl::StrCat("agree/", exchanges_++, "/");
  const auto key = [&prefix](int peer) { return absl::StrCat(prefix, peer); };
  std::vector<std::string> everyone;
  for (int peer = 0; peer < rank.world_size; ++peer) everyone.push_back(key(peer));
  absl::Status agreed;
  absl::Status exchanged = CatchStatus("exchanging results with the other ranks", [&] {
    // The code, a blank, the message.
    group.store->set(key(rank.rank),
                     Bytes(absl::StrCat(static_cast<int>(mine.code()), " ", mine.message())));
    group.store->wait(everyone);
    for (int peer = 0; peer < rank.world_size && agreed.ok(); ++peer) {
      const std::string text = Text(group.store->get(key(peer)));
      int code = 0;
      const size_t blank = text.find(' ');
      if (!absl::SimpleAtoi(text.substr(0, blank), &code) || code == 0) continue;
      agreed = absl::Status(static_cast<absl::StatusCode>(code),
                            absl::StrCat("rank ", peer, ": ", text.substr(blank + 1)));
      agreed.SetPayload(kReported, absl::Cord(""));
    }
    // Who exits first may take the others with it, so all wait until the error is out; and at the
    // end of a run, rank 0, which serves the store, until everybody has read it.
    if (is_main()) {
      if (!agreed.ok()) PrintError(agreed.message());
      group.store->set(prefix + "printed", Bytes("1"));
      std::vector<std::string> read;
      for (int peer = 1; peer < rank.world_size; ++peer) {
        read.push_back(absl::StrCat(prefix, "read/", peer));
      }
      group.store->wait(read);
    } else {
      group.store->wait({prefix + "printed"});
      group.store->set(absl::StrCat(prefix, "read/", rank.rank), Bytes("1"));
    }
  });
  if (!agreed.ok()) return agreed;
  // A rank's own error tells more than that it could not tell the others.
  if (!mine.ok() || exchanged.ok()) return mine;
  std::vector<int> missing;
  absl::Status asked = CatchStatus("", [&] {
    for (int peer = 0; peer < rank.world_size; ++peer) {
      if (!group.store->check({key(peer)})) missing.push_back(peer);
    }
  });
  if (!asked.ok() || missing.empty()) return exchanged;
  return absl::DeadlineExceededError(absl::StrCat(
      "rank ", rank.rank, " waited in vain for rank ", absl::StrJoin(missing, ", "),
      ", which is slow (loading data, saving a checkpoint) or hangs; if it is slow, raise the ",
      "timeout (--timeout_s)"));
}

absl::StatusOr<std::string> Session::FromMain(const absl::StatusOr<std::string>& value) const {
  if (rank.world_size == 1) return value;
  const std::string key = absl::StrCat("main/", exchanges_++);
  absl::Status mine = is_main() ? value.status() : absl::OkStatus();
  std::string result;
  if (mine.ok()) {
    mine = CatchStatus("handing out rank 0's value", [&] {
      if (is_main()) group.store->set(key, Bytes(*value));
    });
  }
  DDP_RETURN_IF_ERROR(Agree(mine));
  return CatchStatus("reading rank 0's value", [&] { return Text(group.store->get(key)); });
}

absl::Status Validate(const SessionOptions& options) {
  if (options.launcher != "auto") {
    DDP_RETURN_IF_ERROR(launchers::CreateLauncher(options.launcher).status());
  }
  // A backend that cannot serve here says more than that there is no such device.
  DDP_RETURN_IF_ERROR(backends::CheckAvailable(options.backend));
  DDP_ASSIGN_OR_RETURN(c10::Device device, ChooseDevice(options.device, /*local_rank=*/0));
  return backends::Validate(GroupOptionsOf(options, device));
}

int DefaultNprocPerNode(const std::string& device, int on_cpu) {
  if (device == "cpu") return on_cpu;
  const int devices = static_cast<int>(torch::cuda::device_count());
  return devices > 0 ? devices : on_cpu;
}

int Run(const SessionOptions& options, int argc, char** argv,
        const std::function<absl::Status(const Session&)>& body) {
  absl::Status valid = CatchStatus("", [&] { return Validate(options); });
  if (!valid.ok()) {
    PrintError(valid.message());
    return kFailure;
  }
  absl::StatusOr<launchers::Choice> choice =
      launchers::Choose(options.launcher, options.nproc_per_node, Environment::FromProcess());
  if (!choice.ok()) {
    PrintError(choice.status().message());
    return kFailure;
  }
  // Once per job: the parent of our own local launcher's ranks says it for them.
  if (!choice->rank || (choice->rank->rank == 0 && choice->launcher->name() != "local")) {
    std::fprintf(stderr, "launcher %s\n", choice->reason.c_str());
  }
  const int nproc = options.nproc_per_node.value_or(options.default_nproc_per_node);
  if (!choice->rank && nproc == 1) choice->rank = launchers::Rank();
  if (choice->rank) {
    absl::Status status = CatchStatus("", [&] { return RunRank(options, *choice->rank, body); });
    if (status.ok()) return 0;
    if (!status.GetPayload(kReported)) {
      // A lost connection is mostly the echo of another rank's failure. That rank's own message
      // comes first, and a launcher that ends the job then leaves it the only one.
      if (absl::IsUnavailable(status)) absl::SleepFor(kEchoDelay);
      const bool says_who =
          choice->rank->world_size == 1 || absl::StartsWith(status.message(), "rank ");
      PrintError(says_who ? std::string(status.message())
                          : absl::StrCat("rank ", choice->rank->rank, ": ", status.message()));
    }
    return kFailure;
  }
  absl::StatusOr<int> code = Launch(*choice->launcher, options, argc, argv);
  if (!code.ok()) {
    PrintError(code.status().message());
    return kFailure;
  }
  return *code;
}

}  // namespace ddp::trainer
