#include "checkpoint/staging.h"

#include <ATen/ATen.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/coordinator.h"
#include "base/file.h"
#include "checkpoint/format.h"
#include "checkpoint/manager.h"
#include "gtest/gtest.h"

namespace ddp::checkpoint {
namespace {

// Has what a copy may lose: tensors that share memory, views, orders of memory, lazy conjugates,
// NaN, nothing at all, and values of all kinds.
State Example() {
  const at::Tensor base = at::arange(24, at::kFloat);
  c10::impl::GenericDict model = NewTree();
  model.insert("base", base);
  model.insert("same", base);
  model.insert("view", base.view({4, 6}).t());
  model.insert("offset", base.narrow(0, 5, 7));
  model.insert(
      "channels_last",
      at::arange(48, at::kFloat).view({2, 3, 2, 4}).contiguous(at::MemoryFormat::ChannelsLast));
  model.insert("half", at::arange(5, at::kFloat).to(at::kBFloat16));
  model.insert("nothing", at::empty({0, 3}));
  model.insert("nan", at::full({2}, std::nan("")));
  model.insert("scalar", at::scalar_tensor(3, at::kLong));
  State state;
  state.root.insert("model", model);
  state.root.insert("conj", at::complex(base, base + 1).conj());
  c10::impl::GenericDict by_number(c10::IntType::get(), c10::AnyType::get());
  by_number.insert(int64_t{7}, base.mul(2));
  state.root.insert("by_number", by_number);
  state.root.insert("order", c10::List<int64_t>({3, 1, 2}));
  c10::impl::GenericList mixed(c10::AnyType::get());
  mixed.push_back(base.mul(3));
  mixed.push_back("text");
  mixed.push_back(std::nan(""));
  state.root.insert("mixed", mixed);
  state.root.insert("pair",
                    c10::ivalue::Tuple::create(std::vector<c10::IValue>{true, base.add(1)}));
  state.sharded["optimizer/exp_avg"] = {.global_shape = {4, 3},
                                        .dtype = at::kFloat,
                                        .parts = {{FlatRange{0, 8}, at::arange(8, at::kFloat)},
                                                  {FlatRange{8, 12}, at::arange(4, at::kFloat)}}};
  state.per_rank.emplace(0, NewTree()).first->second.insert("rng", at::arange(9, at::kByte));
  return state;
}

// The bytes of all files of a checkpoint, by name.
std::map<std::string, std::string> Saved(const std::string& format, const State& state) {
  const std::string folder = absl::StrCat(testing::TempDir(), "/staging");
  std::filesystem::remove_all(folder);
  const SingleRank ranks;
  auto manager = Manager::Create({.directory = folder, .format = format}, ranks);
  EXPECT_TRUE(manager.ok()) << manager.status();
  const auto path = (*manager)->Save("epoch_1", state);
  EXPECT_TRUE(path.ok()) << path.status();
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    if (!entry.is_regular_file() || name[0] == '.') continue;
    files[name] = ReadFile(entry.path()).value();
  }
  return files;
}

TEST(StagingTest, EveryFormatWritesTheSameBytesOfACopy) {
  for (const std::string& format : WritableFormats()) {
    SCOPED_TRACE(format);
    Staging staging;
    const State state = Example();
    const auto copy = staging.Copy(state);
    ASSERT_TRUE(copy.ok()) << copy.status();
    const auto files = Saved(format, state);
    EXPECT_FALSE(files.empty());
    EXPECT_TRUE(Saved(format, *copy) == files);
  }
}

TEST(StagingTest, ACopyStaysAsItIsWhileTheStateChanges) {
  Staging staging;
  State state = Example();
  const auto copy = staging.Copy(state);
  ASSERT_TRUE(copy.ok()) << copy.status();
  state.root.at("model").toGenericDict().at("base").toTensor().fill_(9);
  state.root.at("model").toGenericDict().insert("more", int64_t{1});
  state.root.at("mixed").toList().set(1, "other");
  state.sharded["optimizer/exp_avg"].parts[0].tensor.zero_();
  state.per_rank.at(0).at("rng").toTensor().zero_();
  EXPECT_TRUE(CheckCopy(Example(), *copy).ok()) << CheckCopy(Example(), *copy);
  EXPECT_FALSE(CheckCopy(state, *copy).ok());
}

TEST(StagingTest, TheNextCopyIsInTheSameMemory) {
  Staging staging;
  const auto place = [](const State& copy) {
    return copy.root.at("model").toGenericDict().at("base").toTensor().const_data_ptr();
  };
  State state = Example();
  const void* first = nullptr;
  {
    const auto copy = staging.Copy(state);
    ASSERT_TRUE(copy.ok()) << copy.status();
    first = place(*copy);
  }
  state.root.at("model").toGenericDict().at("base").toTensor().fill_(9);
  const auto again = staging.Copy(state);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(place(*again), first);
  EXPECT_TRUE(CheckCopy(state, *again).ok()) << CheckCopy(state, *again);
  // What is saved beside the state has memory of its own, or that of the state if it shares it.
  const auto more = staging.Add(at::ones({3}));
  ASSERT_TRUE(more.ok()) << more.status();
  EXPECT_TRUE(CheckCopy(state, *again).ok());
  const auto shared = staging.Add(state.root.at("model").toGenericDict().at("base"));
  ASSERT_TRUE(shared.ok()) << shared.status();
  EXPECT_EQ(shared->toTensor().const_data_ptr(), first);

  // What was copied beside the state has its memory for the next time, too.
  const void* const beside = more->toTensor().const_data_ptr();
  ASSERT_TRUE(staging.Copy(state).ok());
  std::vector<at::Tensor> takers;  // of memory that was given back
  for (int i = 0; i < 64; ++i) takers.push_back(at::empty({3}));
  EXPECT_EQ(staging.Add(at::ones({3}))->toTensor().const_data_ptr(), beside);
}

TEST(StagingTest, CheckCopyNamesWhatDiffers) {
  const State state = Example();
  const auto expect = [&](const std::string& name, const std::function<void(State&)>& change) {
    Staging staging;
    State copy = staging.Copy(state).value();
    ASSERT_TRUE(CheckCopy(state, copy).ok()) << CheckCopy(state, copy);
    change(copy);
    const absl::Status differs = CheckCopy(state, copy);
    EXPECT_TRUE(absl::IsDataLoss(differs)) << name;
    EXPECT_TRUE(absl::StrContains(differs.message(), name)) << differs;
  };
  const auto model = [](State& copy) { return copy.root.at("model").toGenericDict(); };
  expect("/model/base", [&](State& c) { model(c).at("base").toTensor()[3].fill_(7); });
  expect("/model/same",
         [&](State& c) { model(c).insert_or_assign("same", at::arange(24, at::kFloat)); });
  expect("/model/view", [&](State& c) {
    model(c).insert_or_assign("view", model(c).at("base").toTensor().view({4, 6}));
  });
  expect("/model/half", [&](State& c) {
    model(c).insert_or_assign("half", model(c).at("half").toTensor().view(at::kHalf));
  });
  expect("/order/1", [](State& c) { c.root.at("order").toIntList().set(1, 5); });
  expect("/mixed/2", [](State& c) { c.root.at("mixed").toList().set(2, 0.5); });
  expect("optimizer/exp_avg (part 1)",
         [](State& c) { c.sharded["optimizer/exp_avg"].parts[1].tensor.zero_(); });
  expect("rank 0", [](State& c) { c.per_rank.clear(); });
}

TEST(StagingTest, EntriesOfRanksAreCompared) {
  const State state = Example();
  Staging staging;
  State copy = staging.Copy(state).value();
  copy.per_rank.at(0).at("rng").toTensor()[3].fill_(7);
  const absl::Status differs = CheckCopy(state, copy);
  EXPECT_TRUE(absl::IsDataLoss(differs)) << differs;
  EXPECT_TRUE(absl::StrContains(differs.message(), "per_rank/0/rng")) << differs;
}

}  // namespace
}  // namespace ddp::checkpoint
