// Runs //tools:train as real processes and compares the bits of their checkpoints.

#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/runfiles.h"
#include "checkpoint/manager.h"
#include "gtest/gtest.h"

namespace ddp {
namespace {

using Flags = std::vector<std::string>;

// A world size and a backend.
struct World {
  std::string name;
  int ranks;
  std::string program;
  std::string backend;
};

const World kAlone = {"alone", 1, "tools/train", "auto"};
const World kShm = {"shm", 2, "tools/train", "shm"};
const World kGloo = {"gloo", 2, "tools/train", "gloo"};
// Two simulated hosts of two ranks each.
const World kHier = {"hier", 4, "tests/parity/train_on_hosts", "hier_pairs"};
// Processes of mpirun. Its cases are a test of their own: not every machine has an MPI.
const World kMpi = {"mpi", 2, "tools/train", "mpi"};
// A program that also has the model "dropout".
const World kDrawing = {"drawing", 2, "tests/parity/train_on_hosts", "shm"};

void PrintTo(const World& world, std::ostream* out) { *out << world.name; }

// Takes seconds, but has all parts of a run: shuffling, momentum, weight decay.
const Flags kCommon = {"--dataset=synthetic", "--train_size=3200", "--test_size=500",
                       "--schedule=constant", "--lr=0.01"};

std::string NewFolder() {
  static int made = 0;
  return absl::StrCat(testing::TempDir(), "/run", made++);
}

Flags Plus(Flags flags, const Flags& more) {
  flags.insert(flags.end(), more.begin(), more.end());
  return flags;
}

// Batches of `global` examples over all ranks.
std::string Batch(const World& world, int global) {
  return absl::StrCat("--batch_size=", global / world.ranks);
}

// Runs the program with its checkpoints in `folder`; later flags win. Returns its output.
std::string TrainInto(const std::string& folder, const World& world, const Flags& flags) {
  const std::string file = folder + ".txt";
  const std::string program =
      absl::StrCat(*Runfile(absl::StrCat("libtorch_ddp/", world.program)), " ",
                   absl::StrJoin(kCommon, " "), " --backend=", world.backend);
  const std::string ranks =
      world.backend == "mpi"
          ? absl::StrCat(*Runfile("libtorch_ddp/backends/mpi/run_under_mpirun.sh"), " ",
                         world.ranks, " ", program, " --launcher=mpi")
          : absl::StrCat(program, " --launcher=local --nproc_per_node=", world.ranks);
  const std::string command = absl::StrCat(ranks, " --checkpoint_dir=", folder, " ",
                                           absl::StrJoin(flags, " "), " >", file, " 2>&1");
  const int status = std::system(command.c_str());
  const std::string output = ReadFile(file).value_or("no output");
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << command << "\n" << output;
  return output;
}

// `output` is TrainInto's. A run from scratch can end with the same bits.
void ExpectResumed(const std::string& output, const std::string& checkpoint) {
  EXPECT_TRUE(absl::StrContains(output, absl::StrCat("resumed from ", checkpoint, ": "))) << output;
}

// The folder of a run from scratch. Tests with the same arguments share it, since runs are
// reproducible: see TheSameRunTwiceHasTheSameBits.
std::string Trained(const World& world, const Flags& flags) {
  static auto* folders = new std::map<std::string, std::string>();
  std::string& folder = (*folders)[absl::StrCat(world.name, " ", absl::StrJoin(flags, " "))];
  if (folder.empty()) {
    folder = NewFolder();
    TrainInto(folder, world, flags);
  }
  return folder;
}

std::string Checkpoint(const std::string& folder, int epoch) {
  return absl::StrCat(folder, "/epoch_", epoch, ".pt");
}

using Tensors = std::map<std::string, at::Tensor>;

Tensors Model(const std::string& folder, int epoch) {
  auto state = checkpoint::Manager::Load(Checkpoint(folder, epoch));
  EXPECT_TRUE(state.ok()) << state.status();
  Tensors tensors;
  if (!state.ok()) return tensors;
  for (const auto& entry : state->root.at("model").toGenericDict()) {
    tensors[entry.key().toStringRef()] = entry.value().toTensor();
  }
  return tensors;
}

// Largest relative difference of a tensor in `a` from the one in `b`: norm of the difference over
// norm.
double Distance(const Tensors& a, const Tensors& b) {
  EXPECT_EQ(a.size(), b.size());
  EXPECT_GT(a.size(), 5);
  double largest = 0;
  for (const auto& [name, tensor] : a) {
    const auto other = b.find(name);
    if (other == b.end()) {
      ADD_FAILURE() << "no " << name;
      continue;
    }
    const at::Tensor value = tensor.to(at::kDouble);  // also the whole numbers of BatchNorm's steps
    const double norm = value.norm().item<double>();
    EXPECT_GT(norm, 0) << name;
    largest = std::max(largest, (other->second - value).norm().item<double>() / norm);
  }
  return largest;
}

// Every tensor anywhere in a value, in order.
void AllTensors(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) tensors.push_back(value.toTensor());
  if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) AllTensors(entry.value(), tensors);
  }
  if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) AllTensors(element, tensors);
  }
}

void ExpectSameBits(const std::string& a, const std::string& b, int epoch) {
  std::vector<at::Tensor> tensors[2];
  const std::string folders[2] = {a, b};
  for (int i : {0, 1}) {
    auto state = checkpoint::Manager::Load(Checkpoint(folders[i], epoch));
    ASSERT_TRUE(state.ok()) << state.status();
    AllTensors(c10::IValue(state->root), tensors[i]);
  }
  ASSERT_EQ(tensors[0].size(), tensors[1].size());
  ASSERT_GT(tensors[0].size(), 10);  // parameters, momentum, random state
  for (size_t i = 0; i < tensors[0].size(); ++i) {
    EXPECT_TRUE(at::equal(tensors[0][i], tensors[1][i])) << "tensor " << i;
  }
}

Flags Mlp(const World& world) { return {"--model=mlp", "--epochs=2", Batch(world, 64)}; }

Flags Cnn(const World& world) {
  return {"--model=cnn", "--epochs=2", "--schedule=cosine", Batch(world, 128)};
}
constexpr int kCnnStepsPerEpoch = 25;  // 3200 examples, 128 at a time

class ParityTest : public testing::TestWithParam<World> {
 protected:
  // `from` saves a checkpoint after its first epoch, and `to` continues from it.
  void ExpectGoesOn(const World& from, const World& to) {
    const std::string whole = Trained(from, Mlp(from));
    const Flags resumed = Plus(Mlp(to), {"--resume=" + Checkpoint(whole, 1)});

    // An epoch of zero learning rate saves the parameters as they were loaded.
    const std::string still = NewFolder();
    TrainInto(still, to, Plus(resumed, {"--lr=0"}));
    const Tensors saved = Model(whole, 1);
    const Tensors loaded = Model(still, 2);
    ASSERT_EQ(loaded.size(), 6);
    for (const auto& [name, tensor] : loaded) {
      EXPECT_TRUE(at::equal(tensor, saved.at(name))) << name;
    }

    const std::string on = NewFolder();
    ExpectResumed(TrainInto(on, to, resumed), Checkpoint(whole, 1));
    EXPECT_LE(Distance(Model(whole, 2), Model(on, 2)), 1e-5);
    // For comparison: an epoch changes the parameters much more.
    EXPECT_GT(Distance(Model(whole, 2), saved), 1e-2);
  }
};

TEST_P(ParityTest, RanksWithAShareOfTheBatchAreOneRankWithAllOfIt) {
  const Tensors many = Model(Trained(GetParam(), Mlp(GetParam())), 1);
  const Tensors one = Model(Trained(kAlone, Mlp(kAlone)), 1);
  // Rounding grows with the number of ranks.
  EXPECT_LE(Distance(one, many), 5e-7 * GetParam().ranks);
}

TEST_P(ParityTest, TheSameRunTwiceHasTheSameBits) {
  const std::string again = NewFolder();
  const std::string limit = absl::StrCat("--stop_at_step=", kCnnStepsPerEpoch);
  TrainInto(again, GetParam(), Plus(Cnn(GetParam()), {limit}));
  EXPECT_FALSE(std::filesystem::exists(Checkpoint(again, 2)));
  ExpectSameBits(Trained(GetParam(), Cnn(GetParam())), again, 1);
}

TEST_P(ParityTest, StoppedAfterEpochOneAndResumedIsTheUninterruptedRun) {
  const std::string parts = NewFolder();
  const std::string limit = absl::StrCat("--stop_at_step=", kCnnStepsPerEpoch);
  TrainInto(parts, GetParam(), Plus(Cnn(GetParam()), {limit}));
  ASSERT_FALSE(std::filesystem::exists(Checkpoint(parts, 2)));
  ExpectResumed(TrainInto(parts, GetParam(), Plus(Cnn(GetParam()), {"--resume=auto"})),
                Checkpoint(parts, 1));
  ExpectSameBits(Trained(GetParam(), Cnn(GetParam())), parts, 2);
}

// The path of a checkpoint that was saved within an epoch.
std::string Checkpoint(const std::string& folder, int epoch, int step) {
  return absl::StrCat(folder, "/epoch_", epoch, "_step_", step, ".pt");
}

// The run stops twice: in the first epoch, before any epoch is saved, and in the second.
TEST_P(ParityTest, StoppedWithinAnEpochAndResumedIsTheUninterruptedRun) {
  const std::string parts = NewFolder();
  const auto train = [&](int steps) {
    const std::string limit = absl::StrCat("--stop_at_step=", steps);
    return TrainInto(parts, GetParam(), Plus(Cnn(GetParam()), {limit, "--resume=auto"}));
  };
  const std::string first = Checkpoint(parts, 0, 10);
  const std::string second = Checkpoint(parts, 1, kCnnStepsPerEpoch + 5);
  train(10);
  ASSERT_TRUE(std::filesystem::exists(first));
  ExpectResumed(train(kCnnStepsPerEpoch + 5), first);
  ASSERT_TRUE(std::filesystem::exists(second));
  ASSERT_FALSE(std::filesystem::exists(Checkpoint(parts, 2)));
  ExpectResumed(train(0), second);
  const std::string whole = Trained(GetParam(), Cnn(GetParam()));
  ExpectSameBits(whole, parts, 1);
  ExpectSameBits(whole, parts, 2);
}

TEST_P(ParityTest, ACheckpointOfAllRanksGoesOnWithOne) { ExpectGoesOn(GetParam(), kAlone); }

TEST_P(ParityTest, ACheckpointOfOneRankGoesOnWithAll) { ExpectGoesOn(kAlone, GetParam()); }

TEST_P(ParityTest, AccumulatedBatchesAreOneBatch) {
  const Tensors one = Model(Trained(GetParam(), Mlp(GetParam())), 1);
  const Flags halves = {Batch(GetParam(), 32), "--accumulate=2", "--epochs=1"};
  const std::string folder = NewFolder();
  TrainInto(folder, GetParam(), Plus(Mlp(GetParam()), halves));
  EXPECT_LE(Distance(one, Model(folder, 1)), 5e-7 * GetParam().ranks);
}

// Five steps: later, rounding has grown. The biases of BatchNorm began at zero and are still small;
// one process's own differ by half a percent between one thread and two. Layers whose statistics
// are the ranks' own differ by more than all of a running mean.
TEST_P(ParityTest, SynchronisedBatchNormIsOneRankWithAllOfTheBatch) {
  const Flags few = {"--epochs=1", "--train_size=640"};
  const auto distance = [&](const Flags& flags) {
    const Tensors one = Model(Trained(kAlone, Plus(Cnn(kAlone), few)), 1);
    return Distance(one, Model(Trained(GetParam(), Plus(Plus(Cnn(GetParam()), few), flags)), 1));
  };
  EXPECT_LE(distance({"--sync_bn=torch"}), 0.01);
  EXPECT_GT(distance({}), 0.1);
}

// The last value of `tag` in the log of a run into `folder`; -1 if it has none.
double LastLogged(const std::string& folder, const std::string& tag) {
  const std::string text = ReadFile(folder + "/metrics.jsonl").value_or("");
  const std::string key = "\"" + tag + "\":";
  const size_t at = text.rfind(key);
  return at == std::string::npos ? -1 : std::atof(text.c_str() + at + key.size());
}

void TrainAndLog(const std::string& folder, const World& world, const Flags& flags) {
  TrainInto(folder, world, Plus(flags, {"--log_dir=" + folder}));
}

INSTANTIATE_TEST_SUITE_P(Over, ParityTest, testing::Values(kShm, kGloo, kHier, kMpi),
                         [](const auto& info) { return info.param.name; });

TEST(AllOptionsTest, TogetherLearnAsWellAsNone) {
  const Flags common = {"--model=cnn",     "--epochs=8",        Batch(kShm, 64),
                        "--lr=0.05",       "--schedule=cosine", "--accumulate=2",
                        "--clip_norm=1.0", "--test_size=5000"};
  const Flags all = {"--zero_stage=2", "--sync_bn=torch", "--comm_hook=bf16_compress",
                     "--precision=bf16"};
  const std::string with_none = NewFolder(), with_all = NewFolder();
  TrainAndLog(with_none, kShm, common);
  TrainAndLog(with_all, kShm, Plus(common, all));
  EXPECT_GT(LastLogged(with_none, "test/accuracy"), 0.85);
  EXPECT_GE(LastLogged(with_all, "test/accuracy"), LastLogged(with_none, "test/accuracy") - 0.01);
}

// Without any one of them the run is another: none is ignored beside the others. Stage 2 and stage
// 0 have equal bits without a hook, and are told apart by what they send.
TEST(AllOptionsTest, EachHasItsEffectBesideTheOthers) {
  const Flags common = {"--model=cnn", "--epochs=1", "--train_size=640", Batch(kShm, 64),
                        "--log_every=1"};
  const Flags all = {"--zero_stage=2",   "--sync_bn=torch", "--comm_hook=bf16_compress",
                     "--precision=bf16", "--accumulate=2",  "--clip_norm=0.1"};
  const std::string with_all = NewFolder();
  TrainAndLog(with_all, kShm, Plus(common, all));
  EXPECT_GT(LastLogged(with_all, "train/gather_bytes"), 0);
  for (size_t left_out = 0; left_out < all.size(); ++left_out) {
    Flags others = common;
    for (size_t i = 0; i < all.size(); ++i) {
      if (i != left_out) others.push_back(all[i]);
    }
    const std::string without = NewFolder();
    TrainAndLog(without, kShm, others);
    EXPECT_GT(Distance(Model(with_all, 1), Model(without, 1)), 1e-5) << "without " << all[left_out];
    if (left_out == 0) {
      EXPECT_LE(LastLogged(without, "train/gather_bytes"), 0);
    }
    if (left_out == 2) {
      EXPECT_EQ(2 * LastLogged(with_all, "train/comm_bytes"),
                LastLogged(without, "train/comm_bytes"));
    }
  }
}

// Each rank's random generator, as saved.
std::vector<at::Tensor> RandomStates(const std::string& path) {
  auto state = checkpoint::Manager::Load(path);
  EXPECT_TRUE(state.ok()) << state.status();
  std::vector<at::Tensor> states;
  if (state.ok()) AllTensors(state->root.at("rng"), states);
  return states;
}

// Ranks as processes: threads share one generator.
TEST(RandomStateTest, EachRankDrawsItsOwnNumbersAndGoesOnWithThem) {
  const Flags flags = {"--model=dropout", "--epochs=2", Batch(kDrawing, 128)};
  const std::string whole = Trained(kDrawing, flags);
  const std::string parts = NewFolder();
  TrainInto(parts, kDrawing, Plus(flags, {"--stop_at_step=10"}));
  const std::string stopped = Checkpoint(parts, 0, 10);
  const std::vector<at::Tensor> then = RandomStates(stopped);
  const std::vector<at::Tensor> at_the_end = RandomStates(Checkpoint(whole, 2));
  ASSERT_EQ(then.size(), 2);
  ASSERT_EQ(at_the_end.size(), 2);
  EXPECT_FALSE(at::equal(then[0], then[1]));
  for (int rank : {0, 1}) EXPECT_FALSE(at::equal(then[rank], at_the_end[rank])) << rank;
  ExpectResumed(TrainInto(parts, kDrawing, Plus(flags, {"--resume=auto"})), stopped);
  ExpectSameBits(whole, parts, 2);
}

// In another world there is no state for each rank: they draw anew, each its own numbers, twice the
// same, and none those of the start.
TEST(RandomStateTest, InAnotherWorldEachRankDrawsNumbersOfItsOwn) {
  const Flags flags = {"--model=dropout", "--epochs=1", Batch(kDrawing, 128), "--lr=0"};
  const std::string alone = NewFolder();
  TrainInto(alone, kDrawing, Plus(flags, {"--nproc_per_node=1", "--stop_at_step=10"}));
  std::vector<std::vector<at::Tensor>> states;
  for (const std::string& resume : {Checkpoint(alone, 0, 10), Checkpoint(alone, 0, 10)}) {
    const std::string folder = NewFolder();
    TrainInto(folder, kDrawing, Plus(flags, {"--resume=" + resume, "--stop_at_step=15"}));
    states.push_back(RandomStates(Checkpoint(folder, 0, 15)));
  }
  const std::string anew = NewFolder();
  TrainInto(anew, kDrawing, Plus(flags, {"--stop_at_step=5"}));  // as many steps
  const std::vector<at::Tensor> start = RandomStates(Checkpoint(anew, 0, 5));
  ASSERT_EQ(states[0].size(), 2);
  ASSERT_EQ(start.size(), 2);
  EXPECT_FALSE(at::equal(states[0][0], states[0][1]));
  for (int rank : {0, 1}) {
    EXPECT_TRUE(at::equal(states[0][rank], states[1][rank])) << rank;
    for (int other : {0, 1}) EXPECT_FALSE(at::equal(states[0][rank], start[other])) << rank;
  }
}

TEST(StopAtStepTest, IsNoPartOfTheRun) {
  const std::string folder = NewFolder();
  const Flags flags = Plus(Mlp(kShm), {"--log_dir=" + folder, "--resume=auto", "--epochs=1"});
  TrainInto(folder, kShm, Plus(flags, {"--stop_at_step=10"}));
  const std::string output = TrainInto(folder, kShm, flags);
  ExpectResumed(output, Checkpoint(folder, 0, 10));
  EXPECT_FALSE(absl::StrContains(output, ", saved ")) << output;
  EXPECT_TRUE(std::filesystem::exists(folder + "/config.yaml"));
  EXPECT_FALSE(std::filesystem::exists(folder + "/config_step_10.yaml"));
}

TEST(SeedTest, AnotherSeedHasOtherParameters) {
  const std::string folder = NewFolder();
  TrainInto(folder, kShm, Plus(Mlp(kShm), {"--seed=1", "--epochs=1"}));
  EXPECT_GT(Distance(Model(Trained(kShm, Mlp(kShm)), 1), Model(folder, 1)), 1e-2);
}

}  // namespace
}  // namespace ddp
