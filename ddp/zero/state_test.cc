// The state is one logical whole: it goes from any world size, stage and partition to any other.

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ddp/zero/zero_testing.h"
#include "optim/state_dict.h"
#include "torch/serialize/archive.h"

namespace ddp::zero {
namespace {

using optim::Dict;

std::vector<at::Tensor> Clones(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> clones;
  for (const at::Tensor& tensor : tensors) clones.push_back(tensor.detach().clone());
  return clones;
}

void SetValues(torch::nn::Module& module, const std::vector<at::Tensor>& values) {
  const at::NoGradGuard no_grad;
  const auto parameters = module.parameters();
  for (size_t i = 0; i < values.size(); ++i) at::Tensor(parameters[i]).copy_(values[i]);
}

// Where a state dict's tensors live on after the optimizer that it came from.
Dict Detached(const Dict& dict) {
  Dict copy = optim::NewDict();
  for (const auto& entry : dict) copy.insert(entry.key(), entry.value().deepcopy());
  return copy;
}

struct Saved {
  std::vector<at::Tensor> parameters;
  Dict state = optim::NewDict();
};

Saved TrainAndSave(int world_size, const NamedOptimizer& optimizer, const ZeroOptions& options,
                   int steps) {
  Saved saved;
  RunRanks(world_size, [&](int rank, const GroupPtr& group) {
    Training run(group, optimizer.make, options);
    for (int step = 0; step < steps; ++step) run.Step(step);
    const int to = world_size - 1;
    auto state = options.stage == 0 ? optim::OptimizerState(run.optimizer())
                                    : run.zero->ConsolidateStateDict(to);
    ASSERT_TRUE(state.ok()) << state.status();
    if (rank != to) {
      if (options.stage != 0) {
        EXPECT_TRUE(state->at("state").toGenericDict().empty());
      }
      return;
    }
    saved = {Clones(run.net->parameters()), Detached(*state)};
  });
  return saved;
}

// The losses of three steps from `step` on, in a training that `prepare` has brought there.
std::vector<double> ThreeLosses(int world_size, const NamedOptimizer& optimizer,
                                const ZeroOptions& options, int step,
                                const std::function<void(Training&)>& prepare) {
  std::vector<double> losses(3);
  std::vector<std::vector<double>> of_rank(world_size, std::vector<double>(3));
  RunRanks(world_size, [&](int rank, const GroupPtr& group) {
    Training run(group, optimizer.make, options);
    prepare(run);
    for (int i = 0; i < 3; ++i) of_rank[rank][i] = run.Step(step + i);
  });
  for (int i = 0; i < 3; ++i) {
    for (int rank = 0; rank < world_size; ++rank) losses[i] += of_rank[rank][i] / world_size;
  }
  return losses;
}

std::vector<double> Uninterrupted(int world_size, const NamedOptimizer& optimizer,
                                  const ZeroOptions& options, int step) {
  return ThreeLosses(world_size, optimizer, options, step, [&](Training& run) {
    for (int i = 0; i < step; ++i) run.Step(i);
  });
}

std::vector<double> GoOn(int world_size, const NamedOptimizer& optimizer,
                         const ZeroOptions& options, const Saved& saved, int step) {
  return ThreeLosses(world_size, optimizer, options, step, [&](Training& run) {
    SetValues(*run.net, saved.parameters);
    SpoilOptions(run.optimizer());
    const absl::Status loaded = options.stage == 0
                                    ? optim::LoadOptimizerState(run.optimizer(), saved.state)
                                    : run.zero->LoadStateDict(saved.state);
    ASSERT_TRUE(loaded.ok()) << loaded;
    EXPECT_EQ(run.optimizer().param_groups()[1].options().get_lr(), 5e-3) << optimizer.name;
  });
}

TEST(ZeroStateTest, SavedAtFourRanksGoesOnAtOneTwoAndThree) {
  for (const NamedOptimizer& optimizer : Optimizers()) {
    const ZeroOptions flat = {.stage = 1};
    const Saved saved = TrainAndSave(4, optimizer, flat, 4);
    const std::vector<double> expected = Uninterrupted(4, optimizer, flat, 4);
    for (const int world_size : {1, 2, 3, 4}) {
      for (const ZeroOptions& options : {ZeroOptions{.stage = 0}, ZeroOptions{.stage = 1},
                                         ZeroOptions{.stage = 2, .partition = "tensor"}}) {
        const std::vector<double> losses = GoOn(world_size, optimizer, options, saved, 4);
        for (int i = 0; i < 3; ++i) {
          EXPECT_NEAR(losses[i], expected[i], 1e-6)
              << optimizer.name << " at " << world_size << ", stage " << options.stage;
        }
      }
    }
  }
}

// Also the reverse, and what the dict looks like: that of the unsharded optimizer, bit for bit.
TEST(ZeroStateTest, TheDictIsThatOfTheUnshardedOptimizer) {
  if (BackendUnderTest() == "hier_in_turns") GTEST_SKIP() << "hier takes three ranks";
  for (const NamedOptimizer& optimizer : Optimizers()) {
    const Saved whole = TrainAndSave(2, optimizer, {.stage = 0}, 3);
    for (const ZeroOptions& options :
         {ZeroOptions{.stage = 1}, ZeroOptions{.stage = 2, .bucket_cap_mb = 0.02},
          ZeroOptions{.stage = 1, .partition = "tensor"}}) {
      const Saved saved = TrainAndSave(2, optimizer, options, 3);
      const auto states = saved.state.at("state").toGenericDict();
      int compared = 0;
      for (const auto& entry : whole.state.at("state").toGenericDict()) {
        const auto expected = entry.value().toGenericDict();
        const auto found = states.find(entry.key());
        if (found == states.end()) {
          // Adagrad has state of parameters before they get a gradient, frozen ones too.
          EXPECT_EQ(optimizer.name, "Adagrad");
          EXPECT_EQ(entry.key().toInt(), 4);
          continue;
        }
        for (const auto& one : expected) {
          EXPECT_TRUE(at::equal(one.value().toTensor(),
                                found->value().toGenericDict().at(one.key()).toTensor()))
              << optimizer.name << ", stage " << options.stage << ": parameter "
              << entry.key().toInt() << " '" << one.key().toStringRef() << "'";
          ++compared;
        }
      }
      EXPECT_GT(compared, 3) << optimizer.name;
      EXPECT_TRUE(saved.state.at("param_groups") == whole.state.at("param_groups"))
          << optimizer.name << ", stage " << options.stage;
    }
    const std::vector<double> expected = Uninterrupted(2, optimizer, {.stage = 0}, 3);
    EXPECT_EQ(GoOn(2, optimizer, {.stage = 0}, whole, 3), expected) << optimizer.name;
    EXPECT_EQ(GoOn(2, optimizer, {.stage = 2}, whole, 3), expected) << optimizer.name;
  }
}

TEST(ZeroStateTest, LocalStatesAreTheParts) {
  std::mutex mutex;
  std::map<int64_t, std::vector<std::pair<int64_t, int64_t>>>
      parts_of;  // by parameter, of all ranks
  std::map<int64_t, int64_t> numel_of;
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    Training run(group, Optimizers()[2].make, {.stage = 2});
    run.Step(0);
    const Dict whole = *run.zero->ConsolidateStateDict(ZeroRedundancyOptimizer::kAllRanks);
    const auto states = whole.at("state").toGenericDict();
    int64_t elements = 0;
    const auto local = run.zero->LocalStates();
    ASSERT_TRUE(local.ok());
    for (const LocalState& part : *local) {
      const at::Tensor full = states.at(part.parameter).toGenericDict().at("exp_avg").toTensor();
      EXPECT_EQ(full.sizes().vec(), part.global_shape);
      const at::Tensor flat = full.permute(part.memory_order).contiguous().flatten();
      EXPECT_TRUE(
          at::equal(flat.slice(0, part.begin, part.end), part.entries.at("exp_avg").toTensor()))
          << "rank " << rank << ", parameter " << part.parameter;
      elements += part.end - part.begin;
      const std::lock_guard<std::mutex> lock(mutex);
      parts_of[part.parameter].emplace_back(part.begin, part.end);
      numel_of[part.parameter] = full.numel();
    }
    // Each parameter with state is in some rank's parts.
    const std::lock_guard<std::mutex> lock(mutex);
    for (const auto& entry : states) {
      const at::Tensor full = entry.value().toGenericDict().at("exp_avg").toTensor();
      if (full.numel() > 0) numel_of[entry.key().toInt()] = full.numel();
    }
    const std::string described = run.zero->Describe();
    EXPECT_TRUE(absl::StrContains(described, absl::StrCat("zero stage 2: rank ", rank, " holds ")))
        << described;
    EXPECT_GT(elements, 0);
  });
  ASSERT_GT(numel_of.size(), 4);
  for (const auto& [parameter, numel] : numel_of) {
    std::vector<std::pair<int64_t, int64_t>>& parts = parts_of[parameter];
    std::sort(parts.begin(), parts.end());
    int64_t covered = 0;
    for (const auto& [begin, end] : parts) {
      EXPECT_EQ(begin, covered) << "parameter " << parameter;
      covered = end;
    }
    EXPECT_EQ(covered, numel) << "parameter " << parameter;
  }
}

TEST(ZeroStateTest, WhatDoesNotFitIsNamedAndChangesNothing) {
  RunRanks(2, [&](int, const GroupPtr& group) {
    Training run(group, Optimizers()[2].make, {.stage = 1});
    run.Step(0);
    const Dict good = *run.zero->ConsolidateStateDict(ZeroRedundancyOptimizer::kAllRanks);
    const auto refused = [&](const Dict& state) {
      const absl::Status status = run.zero->LoadStateDict(state);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      return std::string(status.message());
    };
    Dict bad = Detached(good);
    auto states = bad.at("state").toGenericDict();
    const int64_t last = 6;  // a vector, in the second group
    states.at(last).toGenericDict().insert_or_assign("exp_avg_sq", at::ones({5, 5}));
    const std::string shape = refused(bad);
    EXPECT_TRUE(absl::StrContains(shape, "parameter group 1: parameter 6: 'exp_avg_sq' has shape"))
        << shape;
    states.at(last).toGenericDict().insert_or_assign("exp_avg_sq", std::string("no tensor"));
    EXPECT_TRUE(absl::StrContains(refused(bad), "is no tensor"));
    bad = Detached(good);
    bad.insert_or_assign("param_groups", c10::impl::GenericList(c10::AnyType::get()));
    EXPECT_TRUE(absl::StrContains(refused(bad), "0 parameter groups, the optimizer 2"));
    run.Step(1);
    EXPECT_FALSE(run.zero->ConsolidateStateDict(7).ok());
  });
}

TEST(ZeroStateTest, SavesAndLoadsLibTorchsArchives) {
  std::string bytes;
  std::vector<at::Tensor> parameters;
  RunRanks(2, [&](int rank, const GroupPtr& group) {
    Training run(group, Optimizers()[0].make, {.stage = 1});
    run.Step(0);
    run.Step(1);
    torch::serialize::OutputArchive archive;
    run.zero->save(archive);
    if (rank == 0) {
      parameters = Clones(run.net->parameters());
      archive.save_to([&](const void* data, size_t size) {
        bytes.append(static_cast<const char*>(data), size);
        return size;
      });
    }
  });
  const auto load = [&](Training& run) {
    SetValues(*run.net, parameters);
    torch::serialize::InputArchive archive;
    archive.load_from(bytes.data(), bytes.size());
    run.zero->load(archive);
  };
  const NamedOptimizer adam = Optimizers()[0];
  EXPECT_EQ(ThreeLosses(2, adam, {.stage = 2}, 2, load), Uninterrupted(2, adam, {.stage = 1}, 2));
}

}  // namespace
}  // namespace ddp::zero
