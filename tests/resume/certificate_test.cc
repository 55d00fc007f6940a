// A run that is interrupted and resumed ends with the same state as one that is not: parameters,
// optimizer state, generators, position, bit by bit, whatever the ranks, the model, the optimizer
// and the format of the checkpoints are. And a run that goes on with other numbers of ranks uses
// each example of an epoch once.
//
// Each rank is a process of its own, as in a real run, since dropout draws from the process's
// generator. It is a fork of this one, which has loaded LibTorch but has not used it, and has no
// threads: starting a program anew takes a second. A pairwise cover of all cases runs, in some
// seconds; RESUME_CASES=product runs each combination of what a checkpoint's contents depend on,
// the other dimensions drawn by RESUME_SEED (1,296 cases, 20 minutes), and RESUME_CASES=all all of
// them (a day, in the shards of googletest).

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/log/absl_check.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/command.h"
#include "base/file.h"
#include "base/loopback_testing.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "base/xxh3.h"
#include "checkpoint/manager.h"
#include "checkpoint/name.h"
#include "ddp/hooks/powersgd.h"
#include "ddp/session/session.h"
#include "ddp/trainer/trainer.h"
#include "gtest/gtest.h"
#include "launchers/rank.h"
#include "launchers/variables.h"
#include "tests/resume/pairwise.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/conv.h"
#include "torch/nn/modules/dropout.h"
#include "torch/nn/modules/linear.h"
#include "torch/utils.h"

namespace ddp {
namespace {

// ---- The cases ----

enum Dimension {
  kRanks,
  kBackend,
  kModel,
  kOptimizer,
  kZeroStage,
  kPrecision,
  kHook,
  kAccumulate,
  kEvenBatches,
  kFormat,
  kSaving,
  kWhen,
  kInterruption,
};

const std::vector<std::vector<std::string>>& Values() {
  static const auto* values = new std::vector<std::vector<std::string>>{
      {"1", "2", "3", "4"},
      {"shm", "gloo"},
      {"cnn", "mlp"},
      {"adamw", "sgd"},
      {"0", "1", "2"},
      {"fp32", "bf16", "fp16"},
      {"allreduce", "powersgd"},
      {"1", "2"},
      {"even", "uneven"},
      {"pt", "safetensors", "sharded"},
      {"sync", "async"},
      {"each_epoch", "each_second_step"},
      {"after_an_epoch", "within_an_epoch", "killed"},
  };
  return *values;
}

std::string ValueOf(const Case& c, Dimension dimension) {
  return Values()[dimension][c[dimension]];
}

int NumberOf(const Case& c, Dimension dimension) {
  int number = 0;
  ABSL_CHECK(absl::SimpleAtoi(ValueOf(c, dimension), &number));
  return number;
}

bool IsFeasible(const Case& c) {
  const bool compresses = ValueOf(c, kHook) == "powersgd";
  if (compresses && ValueOf(c, kZeroStage) == "2") return false;  // refused
  // One rank has no backend, no hook, and nobody to be uneven with.
  return NumberOf(c, kRanks) > 1 ||
         (ValueOf(c, kBackend) == "shm" && !compresses && ValueOf(c, kEvenBatches) == "even");
}

// "3_shm_cnn_adamw_zero2_bf16_allreduce_1_even_sharded_async_each_epoch_killed", up to a dimension.
std::string Name(const Case& c, Dimension last = kInterruption) {
  std::vector<std::string> words;
  for (int d = 0; d <= last; ++d) {
    words.push_back(
        absl::StrCat(d == kZeroStage ? "zero" : "", ValueOf(c, static_cast<Dimension>(d))));
  }
  return absl::StrJoin(words, "_");
}

// One case of each combination of the dimensions that are not named here. These are drawn, the
// first three alike for all cases of one uninterrupted run, which thus share it.
std::vector<Case> ProductOf(const std::vector<Case>& all, const std::string& seed) {
  std::map<Case, std::pair<std::pair<uint64_t, uint64_t>, Case>> first;
  for (const Case& c : all) {
    Case combination = c;
    for (const Dimension drawn : {kBackend, kAccumulate, kEvenBatches, kWhen, kInterruption}) {
      combination[drawn] = 0;
    }
    std::pair drawn(std::pair(Xxh3(seed + Name(c, kEvenBatches)), Xxh3(seed + Name(c))), c);
    const auto [at, is_new] = first.try_emplace(std::move(combination), drawn);
    if (!is_new) at->second = std::min(at->second, drawn);
  }
  std::vector<Case> cases;
  for (const auto& [combination, drawn] : first) cases.push_back(drawn.second);
  return cases;
}

std::vector<Case> CasesToRun() {
  std::vector<int> counts;
  for (const auto& values : Values()) counts.push_back(static_cast<int>(values.size()));
  const std::vector<Case> all = AllCases(counts, &IsFeasible);
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  const std::string which = variable("RESUME_CASES");
  if (which == "all") return all;
  return which == "product" ? ProductOf(all, variable("RESUME_SEED")) : PairwiseCover(all);
}

// ---- Ranks as processes ----

// How a world ended.
struct Ended {
  std::vector<int> statuses;  // waitpid's
  std::string output;         // of all ranks
};

bool AllSucceeded(const Ended& ended) {
  return std::all_of(ended.statuses.begin(), ended.statuses.end(),
                     [](int status) { return WIFEXITED(status) && WEXITSTATUS(status) == 0; });
}

bool AllKilled(const Ended& ended) {
  return std::all_of(ended.statuses.begin(), ended.statuses.end(),
                     [](int status) { return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL; });
}

// What a rank runs. `kill_us`: on rank 0, has all ranks killed, and does not return.
using Body =
    std::function<absl::Status(const session::Session&, const std::function<void()>& kill_us)>;

// The child's part of RunWorld; does not return.
[[noreturn]] void RunAsRank(const launchers::Rank& place, const std::string& backend,
                            const std::string& output, const UniqueFd& kill_us, const Body& body) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const int file = ::open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  ABSL_CHECK_GE(file, 0) << output;
  for (const int stream : {STDOUT_FILENO, STDERR_FILENO}) ABSL_CHECK_GE(::dup2(file, stream), 0);
  for (const auto& [name, value] : launchers::VariablesFromRank(place)) {
    ::setenv(name.c_str(), value.c_str(), 1);
  }
  session::SessionOptions options;
  options.launcher.name = "torchrun";
  options.group.backend = backend;
  std::string program = "certificate_test";
  char* argv[] = {program.data(), nullptr};
  const int code = session::Run(options, 1, argv, [&](const session::Session& session) {
    return body(session, [&kill_us] {
      ABSL_CHECK_EQ(::write(kill_us.get(), "k", 1), 1);
      for (;;) ::pause();
    });
  });
  std::fflush(nullptr);
  ::_exit(code);
}

int64_t OwnThreads() {
  int64_t threads = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator("/proc/self/task")) {
    ++threads;
  }
  return threads;
}

// Runs `body` as each rank of a world and waits for all. Outputs go to files in `folder`.
Ended RunWorld(int ranks, const std::string& backend, const std::string& folder, const Body& body) {
  ABSL_CHECK_EQ(OwnThreads(), 1) << "a fork of a process with threads has only one of them";
  std::filesystem::create_directories(folder);
  launchers::Rank place;
  place.world_size = place.local_world_size = ranks;
  LoopbackListener listener = ListenOnLoopback();
  place.master_port = listener.port;
  int pipe[2];
  ABSL_CHECK_EQ(::pipe2(pipe, O_CLOEXEC), 0);
  const UniqueFd asked(pipe[0]);
  UniqueFd kill_us(pipe[1]);
  std::vector<pid_t> pids;
  for (int rank = 0; rank < ranks; ++rank) {
    place.rank = place.local_rank = rank;
    place.master_listen_fd =
        rank == 0 && ranks > 1 ? std::optional<int>(listener.fd.get()) : std::nullopt;
    std::fflush(nullptr);
    const pid_t pid = ::fork();
    ABSL_CHECK_GE(pid, 0);
    if (pid == 0) {
      RunAsRank(place, backend, absl::StrCat(folder, "/rank_", rank, ".txt"), kill_us, body);
    }
    pids.push_back(pid);
    // Rank 0 alone holds them, so that both end with it.
    listener.fd.Close();
    kill_us.Close();
  }
  char letter;
  if (::read(asked.get(), &letter, 1) == 1) {
    for (const pid_t pid : pids) ::kill(pid, SIGKILL);
  }
  Ended ended;
  for (int rank = 0; rank < ranks; ++rank) {
    ended.statuses.push_back(0);
    ABSL_CHECK_EQ(::waitpid(pids[rank], &ended.statuses.back(), 0), pids[rank]);
    absl::StrAppend(&ended.output, "rank ", rank, ":\n",
                    ReadFile(absl::StrCat(folder, "/rank_", rank, ".txt")).value_or(""));
  }
  return ended;
}

// ---- What the ranks train ----

constexpr int64_t kClasses = 4;

// [n, 3, 8, 8], and targets [n] or, with their indices, [n, 2].
class Waves : public data::Dataset {
 public:
  Waves(int64_t size, bool with_indices) : size_(size), with_indices_(with_indices) {}
  int64_t size() const override { return size_; }
  data::Batch Get(absl::Span<const int64_t> indices) const override {
    const at::Tensor index =
        at::tensor(std::vector<int64_t>(indices.begin(), indices.end()), at::kLong);
    const at::Tensor frequency = at::arange(1, 3 * 8 * 8 + 1, at::kDouble).mul(0.37);
    const at::Tensor input = (index.add(1).to(at::kDouble).unsqueeze(1) * frequency).sin();
    const at::Tensor target = index.remainder(kClasses);
    return {input.to(at::kFloat).view({-1, 3, 8, 8}),
            with_indices_ ? at::stack({target, index}, 1) : target};
  }

 private:
  const int64_t size_;
  const bool with_indices_;
};

struct Cnn : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input) {
    at::Tensor x = norm1->forward(conv1->forward(input)).relu();
    x = drop->forward(norm2->forward(conv2->forward(x)).relu());
    return out->forward(x.flatten(1));
  }
  torch::nn::Conv2d conv1{
      register_module("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3).padding(1)))};
  torch::nn::Conv2d conv2{register_module(
      "conv2", torch::nn::Conv2d(torch::nn::Conv2dOptions(8, 8, 3).stride(2).padding(1)))};
  torch::nn::BatchNorm2d norm1{register_module("norm1", torch::nn::BatchNorm2d(8))};
  torch::nn::BatchNorm2d norm2{register_module("norm2", torch::nn::BatchNorm2d(8))};
  torch::nn::Dropout drop{register_module("drop", torch::nn::Dropout(0.3))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(8 * 4 * 4, kClasses))};
};

struct Mlp : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input) {
    return out->forward(in->forward(input.flatten(1)).relu());
  }
  torch::nn::Linear in{register_module("in", torch::nn::Linear(3 * 8 * 8, 32))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(32, kClasses))};
};

// Every rank makes the same one.
trainer::Task MakeTask(const std::string& model) {
  torch::manual_seed(1);
  if (model == "mlp") return trainer::Classification("mlp", std::make_shared<Mlp>());
  return trainer::Classification("cnn", std::make_shared<Cnn>(), /*channels_last=*/true);
}

// ---- What is compared ----

// SHA-256 of each file, in hexadecimal digits: by the program, since no library here has it.
absl::StatusOr<std::vector<std::string>> DigestsOf(const std::vector<std::string>& files) {
  std::vector<std::string> command = {"sha256sum", "--zero"};
  command.insert(command.end(), files.begin(), files.end());
  DDP_ASSIGN_OR_RETURN(const CommandResult result, RunCommand(command));
  constexpr size_t kDigits = 64;
  std::vector<std::string> digests;
  for (const absl::string_view line : absl::StrSplit(result.out, '\0', absl::SkipEmpty())) {
    digests.emplace_back(line.substr(0, kDigits));
  }
  if (result.exit_code == 0 && digests.size() == files.size()) return digests;
  return absl::InternalError(absl::StrCat("sha256sum: ", result.err));
}

// The values of a checkpoint, as text by path, and its tensors, of which the text lacks the values.
struct Contents {
  std::map<std::string, std::string> lines;
  std::map<std::string, at::Tensor> tensors;
};

void AddLines(const std::string& path, const c10::IValue& value, Contents& values) {
  std::map<std::string, std::string>& lines = values.lines;
  if (value.isTensor()) {
    const at::Tensor tensor = value.toTensor().contiguous();
    lines[path] = absl::StrCat(checkpoint::DtypeName(tensor.scalar_type()), " [",
                               absl::StrJoin(tensor.sizes(), ", "), "]");
    values.tensors[path] = tensor;
  } else if (value.isGenericDict()) {
    lines[path] = "dict";
    for (const auto& entry : value.toGenericDict()) {
      AddLines(absl::StrCat(path, "/", checkpoint::KeyText(entry.key())), entry.value(), values);
    }
  } else if (value.isList() || value.isTuple()) {
    lines[path] = value.isList() ? "list" : "tuple";
    const std::vector<c10::IValue> items =
        value.isList() ? value.toListRef().vec() : value.toTupleRef().elements().vec();
    for (size_t i = 0; i < items.size(); ++i) {
      AddLines(absl::StrCat(path, "/", i), items[i], values);
    }
  } else if (value.isDouble()) {
    lines[path] = absl::StrFormat("%a", value.toDouble());
  } else {
    lines[path] = absl::StrCat(value.tagKind(), " ",
                               value.isString() ? value.toStringRef()
                               : value.isInt()  ? absl::StrCat(value.toInt())
                               : value.isBool() ? absl::StrCat(value.toBool())
                                                : "");
  }
}

// Puts numbers in the place of names of parameters, which an optimizer's state has in the format
// sharded.
void NumberParameters(std::map<std::string, std::string>& lines) {
  for (int i = 0;; ++i) {
    const auto parameter = lines.find(absl::StrCat("/optimizer/param_groups/0/params/", i));
    if (parameter == lines.end()) return;
    absl::string_view name = parameter->second;
    if (!absl::ConsumePrefix(&name, "String ")) continue;
    const std::string named = absl::StrCat("/optimizer/state/", name);
    const std::string numbered = absl::StrCat("/optimizer/state/", i);
    parameter->second = absl::StrCat("Int ", i);
    std::map<std::string, std::string> renamed;
    for (auto& [path, line] : lines) {
      const bool is_its = path == named || absl::StartsWith(path, named + "/");
      renamed[is_its ? numbered + path.substr(named.size()) : path] = std::move(line);
    }
    lines = std::move(renamed);
  }
}

// Adds the digests of the tensors' bits to their lines.
absl::Status AddDigests(const std::string& scratch, Contents& values) {
  std::filesystem::create_directories(scratch);
  std::vector<std::string> files;
  for (const auto& [path, tensor] : values.tensors) {
    files.push_back(absl::StrCat(scratch, "/", files.size()));
    std::ofstream(files.back(), std::ios::binary)
        .write(static_cast<const char*>(tensor.const_data_ptr()),
               static_cast<std::streamsize>(tensor.nbytes()));
  }
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> digests, DigestsOf(files));
  std::filesystem::remove_all(scratch);
  size_t next = 0;
  for (const auto& [path, tensor] : values.tensors) {
    absl::StrAppend(&values.lines[path], " ", digests[next++]);
  }
  return absl::OkStatus();
}

// All of a checkpoint, one line per value: its path, and the value or the digest of its bits.
// The same for all formats. `scratch`: a folder for files that are removed again.
absl::StatusOr<std::string> Listing(const std::string& path, const std::string& scratch) {
  DDP_ASSIGN_OR_RETURN(checkpoint::State state, checkpoint::Manager::Load(path));
  Contents values;
  std::map<std::string, std::string>& lines = values.lines;
  // Formats that all ranks write have the generators of each rank there, the others a list of them.
  for (const auto& [rank, own] : state.per_rank) {
    for (const auto& entry : own) {
      const std::string& key = entry.key().toStringRef();
      AddLines(absl::StrCat(key == "rng" ? "" : "/per_rank", "/", key, "/", rank), entry.value(),
               values);
      if (key == "rng") lines["/rng"] = "list";
    }
  }
  AddLines("", state.root, values);
  DDP_RETURN_IF_ERROR(AddDigests(scratch, values));
  NumberParameters(lines);
  return absl::StrJoin(lines, "\n", [](std::string* out, const auto& line) {
    absl::StrAppend(out, line.first, " ", line.second);
  });
}

// ---- The certificate ----

// Each rank has 6 batches, the last of one example; where ranks are uneven, all but one have 5.
int64_t Examples(int ranks) { return 20 * ranks + 1; }
constexpr int64_t kBatch = 4;
constexpr int64_t kBatchesPerEpoch = 6;

// Where a run ends, if not at its end.
struct End {
  int64_t stop_at_step = 0;
  int64_t killed_at_step = 0;
};

trainer::TrainerOptions OptionsOf(const Case& c, const std::string& folder) {
  trainer::TrainerOptions options;
  options.epochs = 2;
  options.batch_size = kBatch;
  options.eval_batch_size = kBatch;
  options.seed = 7;
  options.clip_norm = 0.5;
  options.log.progress = false;
  options.optimizer = {.name = ValueOf(c, kOptimizer), .lr = 0.02};
  options.schedule.name = "cosine";
  options.precision = ValueOf(c, kPrecision);
  // The scale is too large at first, and grows within the run.
  options.grad_scaler = {.init_scale = 1e9, .backoff_factor = 1e-4, .growth_interval = 2};
  options.accumulate = NumberOf(c, kAccumulate);
  options.even_batches = ValueOf(c, kEvenBatches) == "even";
  options.comm_hook.name = ValueOf(c, kHook);
  options.comm_hook.implementations.Mutable<hooks::PowerSgdOptions>("powersgd") = {
      .start_iter = 2, .min_compression_rate = 0.5};
  options.zero.stage = NumberOf(c, kZeroStage);
  options.checkpoint.manager.directory = folder + "/checkpoints";
  options.checkpoint.manager.format = ValueOf(c, kFormat);
  options.checkpoint.async = ValueOf(c, kSaving) == "async";
  options.checkpoint.every_steps = ValueOf(c, kWhen) == "each_epoch" ? 0 : 2;
  options.checkpoint.resume = "auto";
  return options;
}

int64_t StepsPerEpoch(const Case& c) { return kBatchesPerEpoch / NumberOf(c, kAccumulate); }

// The step of the newest checkpoint of the case's run in `folder`; 0: there is none.
int64_t NewestStep(const Case& c, const std::string& folder) {
  int64_t newest = 0;
  const absl::StatusOr<std::vector<std::string>> files = ListDirectory(folder + "/checkpoints");
  if (!files.ok()) return 0;
  for (const std::string& file : *files) {
    const auto parsed = checkpoint::ParseFileName(file, {"." + ValueOf(c, kFormat)});
    if (!parsed.has_value()) continue;
    const checkpoint::CheckpointName& name = parsed->name;
    newest = std::max(newest, name.steps.value_or(*name.epochs * StepsPerEpoch(c)));
  }
  return newest;
}

// Runs or goes on with the case's run in `folder`. At the end of the whole run there is the file
// `listing`; `first_step` has the number of the first step that was taken.
Ended RunIn(const std::string& folder, const Case& c, const End& end) {
  const int ranks = NumberOf(c, kRanks);
  const auto body = [&](const session::Session& session,
                        const std::function<void()>& kill_us) -> absl::Status {
    const trainer::Task task = MakeTask(ValueOf(c, kModel));
    trainer::TrainerOptions options = OptionsOf(c, folder);
    options.stop_at_step = end.stop_at_step;
    int64_t first_step = 0;
    options.on_step = [&](int64_t step, const at::Tensor&) {
      if (first_step == 0) first_step = step;
      if (session.is_main() && step == end.killed_at_step) {
        // Another thread may still be saving.
        while (NewestStep(c, folder) == 0) absl::SleepFor(absl::Milliseconds(1));
        kill_us();
      }
      return trainer::StepAction::kContinue;
    };
    const Waves train(Examples(ranks), false), test(2 * kBatch + 1, false);
    DDP_RETURN_IF_ERROR(trainer::Train(session, task, train, test, options).status());
    if (!session.is_main()) return absl::OkStatus();
    DDP_RETURN_IF_ERROR(WriteFileAtomically(folder + "/first_step", absl::StrCat(first_step)));
    if (end.stop_at_step != 0) return absl::OkStatus();
    DDP_ASSIGN_OR_RETURN(const std::string listing,
                         Listing(absl::StrCat(options.checkpoint.manager.directory, "/",
                                              checkpoint::EpochName(2), ".", ValueOf(c, kFormat)),
                                 folder + "/tensors"));
    return WriteFileAtomically(folder + "/listing", listing);
  };
  return RunWorld(ranks, ValueOf(c, kBackend), folder, body);
}

std::string FolderOf(const std::string& name) {
  const std::string folder = absl::StrCat(testing::TempDir(), "/", name);
  std::filesystem::remove_all(folder);
  return folder;
}

// The listing of the uninterrupted run, in format pt with few saves: formats, ways to save and
// interruptions share it.
std::string Uninterrupted(Case c) {
  static auto* listings = new std::map<std::string, std::string>();
  c[kFormat] = c[kSaving] = c[kWhen] = 0;
  std::string& listing = (*listings)[Name(c, kEvenBatches)];
  if (!listing.empty()) return listing;
  const std::string folder = FolderOf(Name(c, kEvenBatches));
  const Ended ended = RunIn(folder, c, {});
  EXPECT_TRUE(AllSucceeded(ended)) << ended.output;
  listing = ReadFile(folder + "/listing").value_or("the uninterrupted run has failed");
  EXPECT_EQ(ReadFile(folder + "/first_step").value_or(""), "1");
  return listing;
}

class CertificateTest : public testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(Cases, CertificateTest, testing::ValuesIn(CasesToRun()),
                         [](const auto& info) { return Name(info.param); });

TEST_P(CertificateTest, InterruptedAndResumedIsTheUninterruptedRun) {
  const Case& c = GetParam();
  const std::string whole = Uninterrupted(c);
  // Position, generators, parameters, buffers of the cnn, and the optimizer's state.
  for (const char* path : {"/epoch ", "/step ", "/rng/0 ", "/model/out.weight ", "/optimizer/"}) {
    ASSERT_TRUE(absl::StrContains(whole, path)) << whole;
  }
  const std::string folder = FolderOf(Name(c));
  const std::string how = ValueOf(c, kInterruption);
  const bool killed = how == "killed", within = how == "within_an_epoch";
  const int64_t epoch = StepsPerEpoch(c);
  const int64_t stop_at_step = within ? epoch + epoch / 2 : epoch;
  const End end = killed ? End{.killed_at_step = epoch + 2} : End{.stop_at_step = stop_at_step};
  const Ended interrupted = RunIn(folder, c, end);
  ASSERT_TRUE(killed ? AllKilled(interrupted) : AllSucceeded(interrupted)) << interrupted.output;
  ASSERT_FALSE(std::filesystem::exists(folder + "/listing"));
  const int64_t saved_at = NewestStep(c, folder);
  if (!killed) {
    ASSERT_EQ(saved_at, stop_at_step);
  } else if (ValueOf(c, kSaving) == "sync") {
    ASSERT_GE(saved_at, epoch);
  }
  const Ended resumed = RunIn(folder, c, {});
  ASSERT_TRUE(AllSucceeded(resumed)) << resumed.output;
  // A run from scratch would end with the same state.
  EXPECT_EQ(ReadFile(folder + "/first_step").value_or(""), absl::StrCat(saved_at + 1));
  const std::string listing = ReadFile(folder + "/listing").value_or("");
  EXPECT_EQ(listing, whole);
  const auto digests = DigestsOf({folder + "/listing"});
  ASSERT_TRUE(digests.ok()) << digests.status();
  std::printf("%s %s\n", digests->front().c_str(), Name(c).c_str());
  if (!HasFailure()) std::filesystem::remove_all(folder);
}

// ---- Other numbers of ranks ----

constexpr int64_t kExamples = 205;

struct Part {
  int ranks;
  int64_t stop_at_step;
};
// 16, then 8, then 12 examples at a time. The last part's 77 examples leave ranks without a batch.
const std::vector<Part> kParts = {{4, 5}, {2, 11}, {3, 0}};

// The lines of model and optimizer: what else there is depends on the stage.
std::string Learned(const std::string& listing) {
  std::vector<std::string> lines = absl::StrSplit(listing, '\n');
  std::erase_if(lines, [](const std::string& line) {
    return !absl::StartsWith(line, "/model/") && !absl::StartsWith(line, "/optimizer/");
  });
  return absl::StrJoin(lines, "\n");
}

struct Training {
  std::string model;
  std::string optimizer;
  bool even_batches;
};

std::string NameOf(const Training& training) {
  return absl::StrCat(training.model, "_", training.optimizer,
                      training.even_batches ? "_even" : "_uneven");
}

// An epoch with 4, then 2, then 3 ranks, in one folder. Returns what each part has learned; adds
// the examples that were trained on to `seen`.
std::vector<std::string> TrainInParts(const Training& training, const std::string& format,
                                      int64_t stage, std::vector<int64_t>& seen) {
  const std::string folder =
      FolderOf(absl::StrCat("parts_", NameOf(training), "_", format, "_", stage));
  std::vector<std::string> learned;
  for (const Part& part : kParts) {
    const auto body = [&](const session::Session& session,
                          const std::function<void()>&) -> absl::Status {
      trainer::Task task = MakeTask(training.model);
      std::ofstream file(absl::StrCat(folder, "/seen_", part.ranks, "_", session.rank()));
      task.loss = [&file, loss = task.loss](const at::Tensor& output, const at::Tensor& target) {
        if (output.requires_grad()) {  // not in evaluations
          for (int64_t i = 0; i < target.size(0); ++i) file << target[i][1].item<int64_t>() << "\n";
        }
        return loss(output, target.select(1, 0));
      };
      task.correct = [correct = task.correct](const at::Tensor& output, const at::Tensor& target) {
        return correct(output, target.select(1, 0));
      };
      trainer::TrainerOptions options;
      options.batch_size = kBatch;
      options.eval_batch_size = kBatch;
      options.even_batches = training.even_batches;
      options.stop_at_step = part.stop_at_step;
      options.log.progress = false;
      options.optimizer = {.name = training.optimizer, .lr = 0.02};
      options.schedule.name = "cosine";
      options.zero.stage = stage;
      options.checkpoint.manager.directory = folder + "/checkpoints";
      options.checkpoint.manager.format = format;
      options.checkpoint.resume = "auto";
      const Waves train(kExamples, true), test(5, true);
      DDP_RETURN_IF_ERROR(trainer::Train(session, task, train, test, options).status());
      if (!session.is_main()) return absl::OkStatus();
      const std::string name = part.stop_at_step != 0
                                   ? checkpoint::EpochStepName(0, part.stop_at_step)
                                   : checkpoint::EpochName(1);
      DDP_ASSIGN_OR_RETURN(
          const std::string listing,
          Listing(absl::StrCat(options.checkpoint.manager.directory, "/", name, ".", format),
                  folder + "/tensors"));
      return WriteFileAtomically(folder + "/listing", listing);
    };
    std::filesystem::remove(folder + "/listing");
    const Ended ended = RunWorld(part.ranks, "shm", folder, body);
    EXPECT_TRUE(AllSucceeded(ended)) << ended.output;
    learned.push_back(Learned(ReadFile(folder + "/listing").value_or("nothing was saved")));
    for (int rank = 0; rank < part.ranks; ++rank) {
      std::ifstream file(absl::StrCat(folder, "/seen_", part.ranks, "_", rank));
      for (int64_t example; file >> example;) seen.push_back(example);
    }
  }
  return learned;
}

using FormatAndStage = std::pair<std::string, int64_t>;

// Trains with each of these, the first of which has whole state, and compares.
void ExpectTheSame(const Training& training, const std::vector<FormatAndStage>& all) {
  std::vector<std::string> unsharded;
  for (const auto& [format, stage] : all) {
    SCOPED_TRACE(absl::StrCat(NameOf(training), ", ", format, ", stage ", stage));
    std::vector<int64_t> seen;
    const std::vector<std::string> learned = TrainInParts(training, format, stage, seen);
    std::sort(seen.begin(), seen.end());
    if (training.even_batches) {
      // Each part may fill up what it is left with so that its ranks have the same number; the last
      // one must.
      const size_t used = seen.size();
      size_t most = kExamples;
      for (const Part& part : kParts) most += static_cast<size_t>(part.ranks) - 1;
      EXPECT_GT(used, static_cast<size_t>(kExamples));
      EXPECT_LE(used, most);
      seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
    }
    std::vector<int64_t> examples(kExamples);
    std::iota(examples.begin(), examples.end(), 0);
    EXPECT_EQ(seen, examples);
    ASSERT_GT(learned[0].size(), 500) << learned[0];
    EXPECT_NE(learned[0], learned[1]);
    EXPECT_NE(learned[1], learned[2]);
    if (unsharded.empty()) unsharded = learned;
    // A part that loads the state and trains on gives the same bits only if it has loaded them.
    EXPECT_EQ(learned, unsharded);
  }
}

TEST(OtherRanksTest, EachExampleOnceAndShardedStateIsTheUnshardedOne) {
  for (const std::string optimizer : {"adamw", "sgd"}) {
    ExpectTheSame({"mlp", optimizer, /*even_batches=*/false},
                  {{"pt", 0}, {"sharded", 0}, {"sharded", 1}, {"sharded", 2}, {"safetensors", 2}});
  }
}

// With buffers, random numbers and channels-last tensors.
TEST(OtherRanksTest, TheCnnToo) {
  ExpectTheSame({"cnn", "adamw", /*even_batches=*/false}, {{"pt", 0}, {"sharded", 1}});
  ExpectTheSame({"cnn", "adamw", /*even_batches=*/true}, {{"pt", 0}, {"sharded", 2}});
}

TEST(OtherRanksTest, WithEvenBatchesFewExamplesAreUsedTwice) {
  ExpectTheSame({"mlp", "sgd", /*even_batches=*/true}, {{"pt", 0}, {"safetensors", 1}});
}

}  // namespace
}  // namespace ddp
