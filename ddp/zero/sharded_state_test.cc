// The state of a sharded optimizer in checkpoints of all ranks: saved without gathering it, and
// loaded, each rank its pieces, at any world size, partition and stage.
#include "ddp/zero/sharded_state.h"

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/coordinator.h"
#include "base/file.h"
#include "base/status.h"
#include "checkpoint/consolidate.h"
#include "checkpoint/manager.h"
#include "checkpoint/staging.h"
#include "checkpoint/state_testing.h"
#include "ddp/counting_allocator_testing.h"
#include "ddp/gather/gather.h"
#include "ddp/zero/zero_testing.h"
#include "optim/state_dict.h"

// Bytes of operator new, which torch's allocator does not use: those of a std::vector. If only one
// of the operators were inlined, GCC would warn of a malloc without its free.
namespace {
std::atomic<int64_t> new_bytes = 0, new_peak = 0;
void Count(int64_t bytes) {
  const int64_t now = new_bytes += bytes;
  for (int64_t peak = new_peak; now > peak && !new_peak.compare_exchange_weak(peak, now);) {
  }
}
}  // namespace

[[gnu::noinline]] void* operator new(size_t size) {
  void* const data = std::malloc(size);
  if (data == nullptr) throw std::bad_alloc();
  Count(static_cast<int64_t>(malloc_usable_size(data)));
  return data;
}
[[gnu::noinline]] void operator delete(void* data) noexcept {
  if (data != nullptr) Count(-static_cast<int64_t>(malloc_usable_size(data)));
  std::free(data);
}
[[gnu::noinline]] void operator delete(void* data, size_t) noexcept { operator delete(data); }

namespace ddp::zero {
namespace {

using checkpoint::Difference;
using checkpoint::Loaded;
using checkpoint::Manager;
using checkpoint::ReadRequest;
using optim::Dict;

// A coordinator over the test's process group.
class GroupCoordinator final : public Coordinator {
 public:
  explicit GroupCoordinator(const GroupPtr& group) : group_(group) {}
  int rank() const override { return group_ ? group_->getRank() : 0; }
  int size() const override { return group_ ? group_->getSize() : 1; }
  absl::StatusOr<std::vector<std::string>> AllGather(const std::string& mine) const override {
    if (!group_) return std::vector<std::string>{mine};
    return ddp::AllGather(group_, mine);
  }
  absl::StatusOr<std::string> Broadcast(const absl::StatusOr<std::string>& value) const override {
    DDP_RETURN_IF_ERROR(Agree(value.status()));
    DDP_ASSIGN_OR_RETURN(const std::vector<std::string> all, AllGather(*value));
    return all[0];
  }
  absl::Status Agree(const absl::Status& mine) const override {
    DDP_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                         AllGather(mine.ok() ? "" : std::string(mine.message())));
    for (size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank].empty()) continue;
      return absl::InvalidArgumentError(absl::StrCat("rank ", rank, ": ", all[rank]));
    }
    return absl::OkStatus();
  }

 private:
  GroupPtr group_;
};

class ShardedStateTest : public testing::Test {
 protected:
  ShardedStateTest() {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    directory_ = absl::StrCat(testing::TempDir(), "/sharded_state_", info->name());
    std::filesystem::remove_all(directory_);
  }

  // In the order of the optimizer's groups; as MixedNet's parameters are called.
  static ParameterNames Names(Training& run) {
    std::map<const void*, std::string> names;
    for (const auto& item : run.net->named_parameters()) {
      names[item.value().unsafeGetTensorImpl()] = item.key();
    }
    ParameterNames ordered;
    for (const at::Tensor& parameter : run.All()) {
      ordered.push_back(names.at(parameter.unsafeGetTensorImpl()));
    }
    return ordered;
  }

  std::unique_ptr<Manager> ManagerOf(const Coordinator& ranks, const std::string& format) {
    auto manager = Manager::Create({.directory = directory_, .format = format}, ranks);
    EXPECT_TRUE(manager.ok()) << manager.status();
    return *std::move(manager);
  }

  // The state after `steps` steps, as an unsharded dict, and saved in `format`.
  Dict Save(int world_size, const NamedOptimizer& optimizer, const ZeroOptions& options, int steps,
            const std::string& format, bool by_name = true) {
    Dict whole = optim::NewDict();
    RunRanks(world_size, [&](int rank, const GroupPtr& group) {
      Training run(group, optimizer.make, options);
      for (int step = 0; step < steps; ++step) run.Step(step);
      const GroupCoordinator ranks(group);
      checkpoint::State state;
      state.root.insert("epoch", int64_t{1});
      const ParameterNames names = by_name ? Names(run) : ParameterNames();
      if (options.stage == 0) {
        const Dict dict = *optim::OptimizerState(run.optimizer());
        state.root.insert("optimizer", dict);
        if (rank == 0) whole = dict.copy();
      } else {
        const absl::Status added = AddShardedState(*run.zero, names, ranks, "optimizer", state);
        ASSERT_TRUE(added.ok()) << added;
        const Dict dict = *run.zero->ConsolidateStateDict(0);
        if (rank == 0) whole = dict.copy();
      }
      const auto saved = ManagerOf(ranks, format)->Save("epoch_1", state);
      ASSERT_TRUE(saved.ok()) << saved.status();
      if (rank == 0) whole = c10::IValue(whole).deepcopy().toGenericDict();
    });
    return whole;
  }

  // What was saved, loaded by a new optimizer with other options, each rank reading its pieces;
  // gathered again.
  Dict Load(int world_size, const NamedOptimizer& optimizer, const ZeroOptions& options,
            const std::string& format, bool by_name = true, bool read_all = false) {
    Dict whole = optim::NewDict();
    RunRanks(world_size, [&](int rank, const GroupPtr& group) {
      Training run(group, optimizer.make, options);
      const GroupCoordinator ranks(group);
      const ParameterNames names = by_name ? Names(run) : ParameterNames();
      SpoilOptions(run.optimizer());
      ReadRequest request;
      if (!read_all) {
        const absl::Status asked = RequestShardedState(*run.zero, names, "optimizer", request);
        ASSERT_TRUE(asked.ok()) << asked;
      }
      const auto loaded = ManagerOf(ranks, format)->LoadNewest(request);
      ASSERT_TRUE(loaded.ok() && loaded->has_value()) << loaded.status();
      const absl::Status taken = LoadShardedState((*loaded)->state, names, "optimizer", *run.zero);
      ASSERT_TRUE(taken.ok()) << taken;
      const Dict dict = *run.zero->ConsolidateStateDict(0);
      if (rank == 0) whole = c10::IValue(dict).deepcopy().toGenericDict();
    });
    return whole;
  }

  // The values of states and groups; the order of a state's entries does not matter.
  static void ExpectSame(const Dict& expected, const Dict& given, const std::string& what) {
    EXPECT_EQ(Difference(expected.at("param_groups"), given.at("param_groups")), "") << what;
    const Dict a = expected.at("state").toGenericDict(), b = given.at("state").toGenericDict();
    EXPECT_EQ(a.size(), b.size()) << what;
    for (const auto& entry : a) {
      ASSERT_TRUE(b.contains(entry.key())) << what << ": " << entry.key();
      const Dict x = entry.value().toGenericDict(), y = b.at(entry.key()).toGenericDict();
      EXPECT_EQ(x.size(), y.size()) << what << ": " << entry.key();
      for (const auto& one : x) {
        ASSERT_TRUE(y.contains(one.key())) << what << ": " << entry.key() << one.key();
        EXPECT_EQ(Difference(one.value(), y.at(one.key())), "")
            << what << ": " << entry.key() << one.key();
      }
    }
  }

  std::string directory_;
};

// Several blocks per rank, with a head of its own at 3 ranks.
const ZeroOptions kStage1 = {.stage = 1};
const ZeroOptions kStage2 = {.stage = 2, .bucket_cap_mb = 0.02};
const ZeroOptions kByTensor = {.stage = 1, .partition = "tensor"};

TEST_F(ShardedStateTest, FromAnyWorldToAnyOther) {
  const NamedOptimizer amsgrad = Optimizers()[1];
  for (const int from : {1, 2, 3, 4}) {
    for (const ZeroOptions& saved : {kStage1, kStage2}) {
      std::filesystem::remove_all(directory_);
      const Dict whole = Save(from, amsgrad, saved, 2, "sharded");
      for (const int to : {1, 2, 3, 4}) {
        for (const ZeroOptions& loaded : {kStage2, kByTensor}) {
          ExpectSame(whole, Load(to, amsgrad, loaded, "sharded"),
                     absl::StrCat(from, " ranks, stage ", saved.stage, ", to ", to, " and ",
                                  loaded.stage));
        }
      }
    }
  }
}

TEST_F(ShardedStateTest, EachKindOfOptimizer) {
  for (const NamedOptimizer& optimizer : Optimizers()) {
    std::filesystem::remove_all(directory_);
    const Dict whole = Save(3, optimizer, kStage2, 2, "sharded");
    ExpectSame(whole, Load(2, optimizer, kStage1, "sharded"), optimizer.name);
    ExpectSame(whole, Load(2, optimizer, kStage1, "sharded", true, /*read_all=*/true),
               optimizer.name);
  }
}

// Of SGD there is no state before the first step, and loading that is no error.
TEST_F(ShardedStateTest, BeforeThereIsState) {
  for (const size_t index : {size_t{0}, size_t{4}}) {
    std::filesystem::remove_all(directory_);
    const NamedOptimizer optimizer = Optimizers()[index];
    const Dict whole = Save(3, optimizer, kStage1, 0, "sharded");
    EXPECT_EQ(whole.at("state").toGenericDict().size(), 0u);
    ExpectSame(whole, Load(2, optimizer, kStage2, "sharded"), optimizer.name);
  }
}

// By numbers, the format pt gets the dict that Python's optimizer takes.
TEST_F(ShardedStateTest, ByNumbersItIsTheUnshardedDict) {
  const NamedOptimizer adam = Optimizers()[0];
  const Dict whole = Save(3, adam, kStage2, 2, "pt", /*by_name=*/false);
  SingleRank alone;
  const auto loaded = ManagerOf(alone, "pt")->LoadNewest();
  ASSERT_TRUE(loaded.ok() && loaded->has_value()) << loaded.status();
  ExpectSame(whole, (*loaded)->state.root.at("optimizer").toGenericDict(), "pt");
  ExpectSame(whole, Load(2, adam, kStage1, "pt", /*by_name=*/false), "in parts");
}

// All bytes of a file, or of the files of a folder.
std::string BytesAt(const std::string& path) {
  if (!std::filesystem::is_directory(path)) return ReadFile(path).value();
  std::string bytes;
  const std::vector<std::string> names = ListDirectory(path).value();
  for (const std::string& name : names) {
    absl::StrAppend(&bytes, name, "\n", ReadFile(absl::StrCat(path, "/", name)).value());
  }
  return bytes;
}

// What MoveOver of the trainer does.
checkpoint::MoveToRank0 MoveOver(const GroupPtr& group) {
  if (!group) return nullptr;
  return [group](int from, const at::Tensor& bytes) {
    return CatchStatus("", [&] {
      std::vector<at::Tensor> messages = {bytes};
      if (group->getRank() == from) group->send(messages, 0, 0)->wait();
      if (group->getRank() == 0) group->recv(messages, from, 0)->wait();
    });
  };
}

// A format that rank 0 writes alone gets the parts one by one: the bytes are those of the whole
// dict, which the unsharded optimizer has, whatever the world and the stage.
TEST_F(ShardedStateTest, OneWriterWritesTheBytesOfTheUnshardedState) {
  for (const NamedOptimizer& optimizer : Optimizers()) {
    // The unsharded one also has the initial state of parameters that never got a gradient.
    if (optimizer.name == "Adagrad") continue;
    Dict whole = optim::NewDict();
    std::map<std::string, std::string> expected;  // by format
    RunRanks(1, [&](int, const GroupPtr& group) {
      Training run(group, optimizer.make, {.stage = 0});
      for (int step = 0; step < 2; ++step) run.Step(step);
      whole = c10::IValue(*optim::OptimizerState(run.optimizer())).deepcopy().toGenericDict();
      const SingleRank alone;
      for (const std::string format : {"pt", "safetensors"}) {
        checkpoint::State state;
        state.root.insert("optimizer", *optim::OptimizerState(run.optimizer()));
        const auto saved = ManagerOf(alone, format)->Save("epoch_1", state);
        ASSERT_TRUE(saved.ok()) << saved.status();
        expected[format] = BytesAt(*saved);
      }
    });
    for (const int world_size : {1, 2, 3}) {
      for (const ZeroOptions& options : {kStage1, kStage2, kByTensor}) {
        RunRanks(world_size, [&](int rank, const GroupPtr& group) {
          Training run(group, optimizer.make, options);
          SpoilOptions(run.optimizer());
          const absl::Status loaded = run.zero->LoadStateDict(whole);
          ASSERT_TRUE(loaded.ok()) << loaded;
          const GroupCoordinator ranks(group);
          for (const std::string format : {"pt", "safetensors"}) {
            checkpoint::State state;
            const absl::Status added =
                AddShardedState(*run.zero, {}, ranks, "optimizer", state, /*places=*/true);
            ASSERT_TRUE(added.ok()) << added;
            auto manager = Manager::Create(
                {.directory = directory_, .format = format, .move = MoveOver(group)}, ranks);
            ASSERT_TRUE(manager.ok()) << manager.status();
            const auto saved = (*manager)->Save("epoch_1", state);
            ASSERT_TRUE(saved.ok()) << saved.status();
            if (rank != 0) continue;
            EXPECT_TRUE(BytesAt(*saved) == expected[format])
                << optimizer.name << ", " << format << ", stage " << options.stage << " on "
                << world_size << " ranks";
          }
        });
      }
    }
  }
}

// Tensors "moments/0", "moments/1", … of `elements` floats, each with its index as all values, of
// which each rank has one range.
checkpoint::State StateOfMoments(int rank, int ranks, int64_t tensors, int64_t elements) {
  checkpoint::State state;
  const int64_t each = elements / ranks;
  for (int64_t i = 0; i < tensors; ++i) {
    state.sharded[absl::StrCat("moments/", i)] = {
        .global_shape = {elements},
        .parts = {{checkpoint::FlatRange{rank * each, (rank + 1) * each},
                   at::full({each}, static_cast<double>(i))}}};
  }
  return state;
}

// Rank 0 needs memory for the largest tensor, and not for all of them. Ranks are threads: it is
// counted over all.
TEST_F(ShardedStateTest, OneWriterNeedsTheLargestTensorMore) {
  constexpr int kRanks = 2;
  constexpr int64_t kElements = 1 << 18, kTensors = 24;  // of 1 MiB
  CountingAllocator& allocator = CountingAllocator::Install();
  for (const std::string format : {"pt", "safetensors"}) {
    RunRanks(kRanks, [&](int rank, const GroupPtr& group) {
      const GroupCoordinator ranks(group);
      checkpoint::State state = StateOfMoments(rank, kRanks, kTensors, kElements);
      c10::impl::GenericDict errors = checkpoint::NewTree();
      for (int64_t i = 0; i < kTensors; ++i) {
        errors.insert(absl::StrCat(i), at::full({kElements}, static_cast<double>(100 * rank + i)));
      }
      state.per_rank.emplace(rank, checkpoint::NewTree()).first->second.insert("errors", errors);
      auto manager = Manager::Create(
          {.directory = directory_, .format = format, .move = MoveOver(group)}, ranks);
      ASSERT_TRUE(manager.ok()) << manager.status();
      ASSERT_TRUE(ranks.Agree(absl::OkStatus()).ok());
      const int64_t before = allocator.bytes();
      allocator.ResetPeak();
      ASSERT_TRUE(ranks.Agree(absl::OkStatus()).ok());
      const auto saved = (*manager)->Save("epoch_1", state);
      ASSERT_TRUE(saved.ok()) << saved.status();
      ASSERT_TRUE(ranks.Agree(absl::OkStatus()).ok());
      if (rank != 0) return;
      const int64_t largest = kElements * 4, messages = 256 << 10;
      EXPECT_GE(allocator.peak_bytes() - before, largest) << format;
      EXPECT_LE(allocator.peak_bytes() - before, largest + messages) << format;
    });
    const SingleRank alone;
    const auto loaded = ManagerOf(alone, format)->LoadNewest();
    ASSERT_TRUE(loaded.ok() && loaded->has_value()) << loaded.status();
    const Dict moments = (*loaded)->state.root.at("moments").toGenericDict();
    for (int64_t i = 0; i < kTensors; ++i) {
      EXPECT_TRUE(at::equal(moments.at(absl::StrCat(i)).toTensor(),
                            at::full({kElements}, static_cast<double>(i))));
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      const Dict errors = (*loaded)->state.per_rank.at(rank).at("errors").toGenericDict();
      for (int64_t i = 0; i < kTensors; ++i) {
        EXPECT_TRUE(at::equal(errors.at(absl::StrCat(i)).toTensor(),
                              at::full({kElements}, static_cast<double>(100 * rank + i))));
      }
    }
  }
}

// To write it later, rank 0 gathers into one copy, of which the memory is used again. Where nothing
// more can be given, there is an error instead of a copy.
TEST_F(ShardedStateTest, OneWritersCopyNeedsTheLargestTensorMore) {
  constexpr int kRanks = 2;
  constexpr int64_t kElements = 1 << 18, kTensors = 24;  // of 1 MiB
  CountingAllocator& allocator = CountingAllocator::Install();
  RunRanks(kRanks, [&](int rank, const GroupPtr& group) {
    const GroupCoordinator ranks(group);
    checkpoint::State state = StateOfMoments(rank, kRanks, kTensors, kElements);
    checkpoint::Staging staging;
    ASSERT_TRUE(ranks.Agree(absl::OkStatus()).ok());
    const int64_t before = allocator.bytes();
    allocator.ResetPeak();
    ASSERT_TRUE(ranks.Agree(absl::OkStatus()).ok());
    for (int save = 0; save < 2; ++save) {
      auto gathering = checkpoint::Gathering::Begin(state, ranks, MoveOver(group));
      ASSERT_TRUE(gathering.ok()) << gathering.status();
      absl::StatusOr<checkpoint::State> copy = absl::UnknownError("");
      const absl::Status given = (*gathering)->Give([&](checkpoint::TensorSource* source) {
        copy = staging.Copy((*gathering)->state(), source);
        return copy.status();
      });
      ASSERT_TRUE(given.ok()) << given;
      if (rank != 0) continue;
      const Dict moments = copy->root.at("moments").toGenericDict();
      ASSERT_EQ(moments.size(), static_cast<size_t>(kTensors));
      for (int64_t i = 0; i < kTensors; ++i) {
        const at::Tensor moment = moments.at(absl::StrCat(i)).toTensor();
        ASSERT_EQ(moment.numel(), kElements);
        const auto* const values = static_cast<const float*>(moment.const_data_ptr());
        EXPECT_EQ(std::count(values, values + kElements, static_cast<float>(i)), kElements) << i;
      }
    }
    ASSERT_TRUE(ranks.Agree(absl::OkStatus()).ok());
    if (rank != 0) return;
    const int64_t each = kElements * 4, messages = 256 << 10;
    EXPECT_GE(allocator.peak_bytes() - before, (kTensors + 1) * each);
    EXPECT_LE(allocator.peak_bytes() - before, (kTensors + 1) * each + messages);
    checkpoint::State lacking;
    const at::Tensor place = at::empty({3}, at::TensorOptions().device(c10::DeviceType::Meta));
    lacking.root.insert("place", place);
    struct Nothing : checkpoint::TensorSource {
      bool Has(const c10::Storage&) const override { return true; }
      absl::StatusOr<at::Tensor> Get(const c10::Storage&) override {
        return absl::UnavailableError("nothing more");
      }
    } nothing;
    EXPECT_EQ(staging.Copy(lacking, &nothing).status().message(), "nothing more");
  });
}

// Where all ranks write: what they have, without a copy but for a tensor that is not contiguous,
// which is copied in pieces of 8 MiB; or one copy, of what they write, also in later saves.
TEST_F(ShardedStateTest, AllWritersNeedPiecesOrOneCopyMore) {
  constexpr int kRanks = 2;
  constexpr int64_t kElements = 1 << 18, kTensors = 24;  // of 1 MiB, of each kind
  CountingAllocator& allocator = CountingAllocator::Install();
  for (const bool by_copy : {false, true}) {
    RunRanks(kRanks, [&](int rank, const GroupPtr& group) {
      const GroupCoordinator ranks(group);
      checkpoint::State state;
      c10::impl::GenericDict model = checkpoint::NewTree();
      for (int64_t i = 0; i < kTensors; ++i) {
        const int64_t each = kElements / kRanks;
        state.sharded[absl::StrCat("moments/", i)] = {
            .global_shape = {kElements},
            .parts = {{checkpoint::FlatRange{rank * each, (rank + 1) * each},
                       at::full({each}, static_cast<double>(i))}}};
        model.insert(absl::StrCat(i), at::full({kElements}, static_cast<double>(i)));
      }
      if (!by_copy) model.insert("transposed", at::zeros({2048, 4096}).t());  // 32 MiB
      state.root.insert("model", model);
      const std::unique_ptr<Manager> manager = ManagerOf(ranks, "sharded");
      checkpoint::Staging staging;
      ASSERT_TRUE(ranks.Agree(absl::OkStatus()).ok());
      const int64_t before = allocator.bytes();
      allocator.ResetPeak();
      ASSERT_TRUE(ranks.Agree(absl::OkStatus()).ok());
      for (int save = 0; save < 3; ++save) {
        checkpoint::State mine = state;
        if (by_copy) mine = staging.Copy(*manager->WhatThisRankWrites(state, {})).value();
        const auto saved = manager->Save("epoch_1", std::move(mine));
        ASSERT_TRUE(saved.ok()) << saved.status();
      }
      ASSERT_TRUE(ranks.Agree(absl::OkStatus()).ok());
      if (rank != 0) return;
      // Of both ranks.
      const int64_t expected = by_copy ? 2 * kTensors * kElements * 4 : kRanks * (8 << 20);
      EXPECT_GE(allocator.peak_bytes() - before, by_copy ? expected : expected / kRanks);
      EXPECT_LE(allocator.peak_bytes() - before, expected + (1 << 20));
    });
  }
}

// Reading back drops each tensor, or each piece of one, once it has been checked.
// Tensors that are made, and pieces of at most 8 MiB that are read to check them.
TEST_F(ShardedStateTest, VerifyingNeedsTheLargestTensor) {
  constexpr int64_t kPiece = 8 << 20;
  constexpr int64_t kElements = 1 << 18, kTensors = 24;  // of 1 MiB
  CountingAllocator& allocator = CountingAllocator::Install();
  const SingleRank alone;
  checkpoint::State state;
  c10::impl::GenericDict model = checkpoint::NewTree();
  for (int64_t i = 0; i < kTensors; ++i) {
    model.insert(absl::StrCat(i), at::full({kElements}, static_cast<double>(i)));
  }
  state.root.insert("model", model);
  for (const std::string format : {"pt", "safetensors", "sharded"}) {
    const auto manager =
        Manager::Create({.directory = directory_, .format = format, .verify = "saved"}, alone);
    ASSERT_TRUE(manager.ok()) << manager.status();
    const int64_t before = allocator.bytes();
    allocator.ResetPeak();
    const int64_t new_before = new_bytes;
    new_peak = new_before;
    const auto saved = (*manager)->Save("epoch_1", state);
    ASSERT_TRUE(saved.ok()) << saved.status();
    EXPECT_LE(allocator.peak_bytes() - before, kElements * 4 + (64 << 10)) << format;
    EXPECT_LE(new_peak - new_before, kPiece + (2 << 20)) << format;
  }
}

TEST_F(ShardedStateTest, FromUnshardedState) {
  const NamedOptimizer adam = Optimizers()[0];
  for (const std::string format : {"pt", "sharded"}) {
    std::filesystem::remove_all(directory_);
    const Dict whole = Save(2, adam, {.stage = 0}, 2, format, /*by_name=*/false);
    ExpectSame(whole, Load(3, adam, kStage2, format, /*by_name=*/false), format);
  }
}

// Reduced precision with fp32 copies.
TEST_F(ShardedStateTest, MasterWeights) {
  const MakeOptimizer adamw = Optimizers()[2].make;
  std::vector<at::Tensor> expected;
  const auto run = [&](int world_size, bool save) {
    RunRanks(world_size, [&](int rank, const GroupPtr& group) {
      auto net = SeededNet<MixedNet>();
      net->to(at::kBFloat16);
      auto made = ZeroRedundancyOptimizer::Create(Groups(*net), group, adamw, {.stage = 1});
      ASSERT_TRUE(made.ok()) << made.status();
      const GroupCoordinator ranks(group);
      const auto manager = ManagerOf(ranks, "sharded");
      if (save) {
        for (const at::Tensor& parameter : net->parameters()) {
          if (parameter.requires_grad()) parameter.mutable_grad() = at::ones_like(parameter) * 0.1;
        }
        (*made)->step();
        checkpoint::State state;
        ASSERT_TRUE(AddShardedState(**made, {}, ranks, "optimizer", state).ok());
        ASSERT_TRUE(manager->Save("epoch_1", state).ok());
      } else {
        ReadRequest request;
        ASSERT_TRUE(RequestShardedState(**made, {}, "optimizer", request).ok());
        const auto loaded = manager->LoadNewest(request);
        ASSERT_TRUE(loaded.ok() && loaded->has_value()) << loaded.status();
        ASSERT_TRUE(LoadShardedState((*loaded)->state, {}, "optimizer", **made).ok());
      }
      const Dict dict = *(*made)->ConsolidateStateDict(0);
      if (rank != 0) return;
      std::vector<at::Tensor> masters;
      for (const auto& entry : dict.at("state").toGenericDict()) {
        masters.push_back(entry.value().toGenericDict().at("master_weight").toTensor().clone());
      }
      ASSERT_GT(masters.size(), 3u);
      if (save) {
        expected = masters;
      } else {
        ExpectSameBits(expected, masters, "master weights");
      }
    });
  };
  run(3, true);
  run(2, false);
}

TEST_F(ShardedStateTest, WhatDoesNotFitIsNamed) {
  RunRanks(2, [&](int rank, const GroupPtr& group) {
    Training run(group, Optimizers()[0].make, kStage1);
    run.Step(0);
    const GroupCoordinator ranks(group);
    ParameterNames names = Names(run);
    checkpoint::State state;
    const auto refused = [&](const absl::Status& status, absl::string_view what) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << what;
      EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
    };
    refused(AddShardedState(*run.zero, {"a", "b"}, ranks, "optimizer", state),
            "2 names for 8 parameters");
    ParameterNames twice = names;
    twice[1] = twice[0];
    refused(AddShardedState(*run.zero, twice, ranks, "optimizer", state), "differ");
    ASSERT_TRUE(AddShardedState(*run.zero, names, ranks, "optimizer", state).ok());
    refused(AddShardedState(*run.zero, names, ranks, "optimizer", state), "'optimizer' already");
    ParameterNames renamed = names;
    renamed[2] = "other";
    refused(LoadShardedState(state, renamed, "optimizer", *run.zero), "'other'");
    refused(LoadShardedState(checkpoint::State(), names, "optimizer", *run.zero), "'optimizer'");
    const std::string path = absl::StrCat("optimizer/state/", names[0], "/exp_avg");
    checkpoint::State other = state;
    other.sharded.at(path).global_shape[0] += 1;
    refused(LoadShardedState(other, names, "optimizer", *run.zero), "has shape");
    other = state;
    other.sharded.at(path).parts.push_back({checkpoint::FlatRange{0, 1}, at::zeros({1})});
    refused(LoadShardedState(other, names, "optimizer", *run.zero), "this rank's pieces");
    // Its own state in pieces is what it takes.
    const Dict before = *run.zero->ConsolidateStateDict(ZeroRedundancyOptimizer::kAllRanks);
    const Dict kept = c10::IValue(before).deepcopy().toGenericDict();
    EXPECT_TRUE(LoadShardedState(state, names, "optimizer", *run.zero).ok());
    ExpectSame(kept, *run.zero->ConsolidateStateDict(ZeroRedundancyOptimizer::kAllRanks),
               absl::StrCat("rank ", rank));
  });
}

}  // namespace
}  // namespace ddp::zero
