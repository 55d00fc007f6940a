// Runs of //tools:train as real processes, compared by the bits of what they saved.

#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "ATen/ATen.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/runfiles.h"
#include "checkpoint/manager.h"
#include "gtest/gtest.h"

namespace ddp {
namespace {

using Flags = std::vector<std::string>;

// Small enough for seconds, and still every part of a run: shuffling, momentum, decay.
const Flags kCommon = {"--dataset=synthetic", "--train_size=3200",   "--test_size=500",
                       "--launcher=local",    "--schedule=constant", "--lr=0.01"};

// Runs the program with a checkpoint folder of its own, and returns that folder.
std::string Train(const std::string& name, const Flags& flags) {
  const std::string folder = absl::StrCat(testing::TempDir(), "/", name);
  const std::string program = *Runfile("libtorch_ddp/tools/train");
  const std::string command =
      absl::StrCat(program, " ", absl::StrJoin(kCommon, " "), " --checkpoint_dir=", folder, " ",
                   absl::StrJoin(flags, " "), " 2>&1");
  const int status = std::system(command.c_str());
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << command;
  return folder;
}

std::map<std::string, at::Tensor> Model(const std::string& folder, int epoch) {
  auto state = checkpoint::Manager::Load(absl::StrCat(folder, "/epoch_", epoch, ".pt"));
  EXPECT_TRUE(state.ok()) << state.status();
  std::map<std::string, at::Tensor> tensors;
  if (!state.ok()) return tensors;
  for (const auto& entry : state->root.at("model").toGenericDict()) {
    tensors[entry.key().toStringRef()] = entry.value().toTensor();
  }
  return tensors;
}

// Every tensor anywhere in a value, in order.
void Tensors(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) tensors.push_back(value.toTensor());
  if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) Tensors(entry.value(), tensors);
  }
  if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) Tensors(element, tensors);
  }
}

void ExpectSameBits(const std::string& a, const std::string& b, int epoch) {
  std::vector<at::Tensor> tensors[2];
  const std::string folders[2] = {a, b};
  for (int i : {0, 1}) {
    auto state = checkpoint::Manager::Load(absl::StrCat(folders[i], "/epoch_", epoch, ".pt"));
    ASSERT_TRUE(state.ok()) << state.status();
    Tensors(c10::IValue(state->root), tensors[i]);
  }
  ASSERT_EQ(tensors[0].size(), tensors[1].size());
  ASSERT_GT(tensors[0].size(), 10);  // parameters, momentum, random state
  for (size_t i = 0; i < tensors[0].size(); ++i) {
    EXPECT_TRUE(at::equal(tensors[0][i], tensors[1][i])) << "tensor " << i;
  }
}

TEST(ParityTest, TwoRanksOfBatch32AreOneRankOfBatch64) {
  const Flags flags = {"--model=mlp", "--epochs=1"};
  Flags two = flags, one = flags;
  two.insert(two.end(), {"--nproc_per_node=2", "--batch_size=32"});
  one.insert(one.end(), {"--nproc_per_node=1", "--batch_size=64"});
  const auto a = Model(Train("two", two), 1);
  const auto b = Model(Train("one", one), 1);
  ASSERT_EQ(a.size(), 6);
  for (const auto& [name, tensor] : b) {
    const double difference = (a.at(name) - tensor).norm().item<double>();
    EXPECT_LE(difference, 1e-6 * tensor.norm().item<double>()) << name;
  }
}

TEST(ParityTest, TheSameRunTwiceHasTheSameBits) {
  const Flags flags = {"--model=cnn", "--epochs=1", "--max_steps=25", "--nproc_per_node=2"};
  ExpectSameBits(Train("first", flags), Train("second", flags), 1);
}

TEST(ParityTest, AnotherSeedHasOthers) {
  const Flags flags = {"--model=mlp", "--epochs=1", "--nproc_per_node=2"};
  Flags seeded = flags;
  seeded.push_back("--seed=1");
  EXPECT_FALSE(at::equal(Model(Train("seed0", flags), 1).at("fc1.weight"),
                         Model(Train("seed1", seeded), 1).at("fc1.weight")));
}

TEST(ParityTest, StoppedAfterEpochOneAndResumedIsTheUninterruptedRun) {
  const Flags flags = {"--model=cnn", "--nproc_per_node=2", "--schedule=cosine", "--epochs=2"};
  Flags stopped = flags, resumed = flags;
  stopped.push_back("--max_steps=25");  // one epoch: 3200 examples of two ranks at batch 64
  resumed.push_back("--resume=auto");
  const std::string whole = Train("whole", flags);
  const std::string parts = Train("parts", stopped);
  EXPECT_FALSE(std::filesystem::exists(parts + "/epoch_2.pt"));
  Train("parts", resumed);
  ExpectSameBits(whole, parts, 2);
}

TEST(ParityTest, ACheckpointOfTwoRanksGoesOnWithOne) {
  const Flags flags = {"--model=mlp"};
  Flags two = flags, one = flags;
  two.insert(two.end(), {"--nproc_per_node=2", "--epochs=1"});
  one.insert(one.end(), {"--nproc_per_node=1", "--epochs=2", "--resume=auto"});
  Train("reshaped", two);
  const std::string folder = Train("reshaped", one);
  EXPECT_TRUE(std::filesystem::exists(folder + "/epoch_2.pt"));
}

TEST(ParityTest, AccumulatedBatchesAreOneBatch) {
  const Flags flags = {"--model=mlp", "--epochs=1", "--nproc_per_node=2"};
  Flags one = flags, two = flags;
  one.push_back("--batch_size=32");
  two.insert(two.end(), {"--batch_size=16", "--accumulate=2"});
  const auto a = Model(Train("batch32", one), 1);
  const auto b = Model(Train("batch16x2", two), 1);
  for (const auto& [name, tensor] : a) {
    EXPECT_LE((b.at(name) - tensor).norm().item<double>(), 1e-6 * tensor.norm().item<double>())
        << name;
  }
}

}  // namespace
}  // namespace ddp
