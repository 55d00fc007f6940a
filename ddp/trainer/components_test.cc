// Components of a user's own in a run's checkpoints, and what is said about those that do not fit.

#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "checkpoint/manager.h"
#include "checkpoint/stateful.h"
#include "ddp/hooks/powersgd.h"
#include "ddp/trainer/callback.h"
#include "ddp/trainer/position.h"
#include "ddp/trainer/trainer_testing.h"
#include "ddp/trainer/training_state.h"
#include "gtest/gtest.h"

namespace ddp::trainer {
namespace {

using checkpoint::LoadNotes;
using checkpoint::State;

// Counts the steps, and remembers something of each rank's own.
class Counter : public checkpoint::Stateful {
 public:
  explicit Counter(int rank, bool takes_all = false) : rank_(rank), takes_all_(takes_all) {}

  absl::StatusOr<State> state_dict() override {
    State state;
    state.root.insert("count", count);
    if (forgets) return state;
    state.per_rank.emplace(rank_, checkpoint::NewTree()).first->second.insert("own", own);
    return state;
  }
  absl::Status CheckStateDict(const State& state) const override {
    if (refuses) return absl::InvalidArgumentError("I refuse");
    for (const auto& [rank, theirs] : state.per_rank) {
      if (const absl::Status fits = checkpoint::CheckTensor(theirs, "own", own); !fits.ok()) {
        return fits;
      }
    }
    return absl::OkStatus();
  }
  absl::Status load_state_dict(const State& state, LoadNotes& notes) override {
    count.copy_(state.root.at("count").toTensor());
    ranks_loaded = static_cast<int>(state.per_rank.size());
    if (takes_all_) {
      // Sums are what several ranks have together.
      own.zero_();
      for (const auto& [rank, theirs] : state.per_rank) own.add_(theirs.at("own").toTensor());
      notes.Add(absl::StrCat("with a sum over ", ranks_loaded));
    } else if (ranks_loaded > 0) {
      own.copy_(state.per_rank.at(rank_).at("own").toTensor());
    }
    return absl::OkStatus();
  }
  bool takes_other_worlds() const override { return takes_all_; }

  at::Tensor count = at::zeros({}, at::kLong);
  at::Tensor own = at::zeros({}, at::kLong);
  int ranks_loaded = -1;
  bool refuses = false;
  bool forgets = false;  // what this rank has of its own

 private:
  const int rank_;
  const bool takes_all_;
};

// Remembers what it hears.
class Listener final : public Callback {
 public:
  explicit Listener(std::string name, bool fails = false) : name_(std::move(name)), fails_(fails) {}

  std::string name() const override { return name_; }
  absl::Status OnSetUp(CallbackContext&) override {
    heard.push_back("set_up");
    return fails_ ? absl::DataLossError("broken") : absl::OkStatus();
  }
  absl::Status OnStart(CallbackContext&) override {
    heard.push_back("start");
    return absl::OkStatus();
  }
  void OnException(CallbackContext&, const absl::Status& error) override {
    heard.push_back(std::string(error.message()));
  }

  std::vector<std::string> heard;

 private:
  const std::string name_;
  const bool fails_;
};

struct Result {
  explicit Result(int world_size) : count(world_size), own(world_size), ranks_loaded(world_size) {}
  std::vector<int64_t> count, own;
  std::vector<int> ranks_loaded;
  absl::Status status;
  std::vector<std::string> unclaimed;
  std::string printed;
  std::vector<at::Tensor> parameters;  // of rank 0
};

class ComponentsTest : public testing::Test {
 protected:
  ComponentsTest()
      : folder_(absl::StrCat(testing::TempDir(), "/",
                             testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::remove_all(folder_);
    options_ = Quiet();
    options_.checkpoint.manager.directory = folder_;
    options_.checkpoint.resume = "auto";
  }

  // Goes on up to this step, with a Counter under the name "counter".
  Result TrainTo(int64_t step, int world_size) {
    Result result(world_size);
    testing::internal::CaptureStderr();
    RunRanks(world_size, [&](const session::Session& session) {
      const int rank = session.rank();
      Counter counter(rank, takes_all_);
      counter.refuses = refuses_;
      counter.forgets = rank == forgets_;
      TrainerOptions options = options_;
      options.stop_at_step = step;
      options.on_step = [&](int64_t, const at::Tensor&) {
        counter.count.add_(1);
        counter.own.add_(rank + 1);
        return StepAction::kContinue;
      };
      if (!name_.empty()) {
        options.components.push_back(
            {.name = name_ + (rank == 1 ? of_rank_1_ : ""), .stateful = &counter});
      }
      Task task = LineTask();
      auto report = Train(session, task, Halves(640), Halves(60), options);
      result.count[rank] = counter.count.item<int64_t>();
      result.own[rank] = counter.own.item<int64_t>();
      result.ranks_loaded[rank] = counter.ranks_loaded;
      if (rank != 0) return;
      result.status = report.status();
      if (report.ok()) result.unclaimed = report->unclaimed;
      result.parameters = task.module->parameters();
    });
    result.printed = testing::internal::GetCapturedStderr();
    return result;
  }

  const std::string folder_;
  TrainerOptions options_;
  std::string name_ = "counter";
  std::string of_rank_1_;
  bool takes_all_ = false;
  bool refuses_ = false;
  int forgets_ = -1;  // the rank that does
};

TEST_F(ComponentsTest, IsSavedAndRestoredWithTheRun) {
  ASSERT_TRUE(TrainTo(3, 2).status.ok());
  const Result result = TrainTo(5, 2);
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.count, (std::vector<int64_t>{5, 5}));
  EXPECT_EQ(result.own, (std::vector<int64_t>{5, 10}));
  EXPECT_EQ(result.ranks_loaded, (std::vector<int>{1, 1})) << "each its own";
  EXPECT_FALSE(absl::StrContains(result.printed, "resumed with")) << result.printed;
  EXPECT_TRUE(result.unclaimed.empty());
}

TEST_F(ComponentsTest, InAnotherWorldEntriesPerRankAreDroppedAndThatIsSaid) {
  ASSERT_TRUE(TrainTo(3, 2).status.ok());
  const Result result = TrainTo(5, 3);
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.count, (std::vector<int64_t>{5, 5, 5}));
  EXPECT_EQ(result.own, (std::vector<int64_t>{2, 4, 6}));
  EXPECT_EQ(result.ranks_loaded, (std::vector<int>{0, 0, 0}));
  EXPECT_TRUE(absl::StrContains(result.printed,
                                "resumed without what each rank had of its own in counter: saved "
                                "with a world size of 2, now 3"))
      << result.printed;
}

TEST_F(ComponentsTest, InAnotherWorldOneThatTakesThemGetsAllRanksEntries) {
  takes_all_ = true;
  ASSERT_TRUE(TrainTo(3, 3).status.ok());
  const Result result = TrainTo(3, 2);
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.own, (std::vector<int64_t>{3 + 6 + 9, 3 + 6 + 9}));
  EXPECT_EQ(result.ranks_loaded, (std::vector<int>{3, 3}));
  EXPECT_TRUE(absl::StrContains(result.printed, "resumed with a sum over 3")) << result.printed;
  EXPECT_FALSE(absl::StrContains(result.printed, "in counter")) << result.printed;
}

TEST_F(ComponentsTest, WhatNoComponentClaimsIsSaidAndComesBack) {
  ASSERT_TRUE(TrainTo(3, 2).status.ok());
  name_ = "";
  const Result result = TrainTo(5, 2);
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.unclaimed, (std::vector<std::string>{"counter", "per_rank/counter"}));
  EXPECT_TRUE(absl::StrContains(
      result.printed, "resumed without what the checkpoint has under counter, per_rank/counter"))
      << result.printed;
}

TEST_F(ComponentsTest, ACheckpointWithoutItIsResumedAndThatIsSaid) {
  name_ = "";
  ASSERT_TRUE(TrainTo(3, 1).status.ok());
  name_ = "counter";
  const Result result = TrainTo(5, 1);
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.count, std::vector<int64_t>{2});
  EXPECT_EQ(result.ranks_loaded, std::vector<int>{-1});
  EXPECT_TRUE(absl::StrContains(result.printed,
                                "resumed without counter, which the checkpoint does not have"))
      << result.printed;
}

// The last component refuses; those before it have not been loaded.
TEST_F(ComponentsTest, IfOneDoesNotFitNothingHasChanged) {
  ASSERT_TRUE(TrainTo(3, 1).status.ok());
  refuses_ = true;
  const Result result = TrainTo(5, 1);
  EXPECT_TRUE(absl::StrContains(result.status.message(), "counter: I refuse")) << result.status;
  const std::vector<at::Tensor> initial = LineTask().module->parameters();
  ASSERT_EQ(result.parameters.size(), initial.size());
  for (size_t i = 0; i < initial.size(); ++i) {
    EXPECT_TRUE(at::equal(result.parameters[i], initial[i]));
  }
}

// The others would wait for what it does not send.
TEST_F(ComponentsTest, ARankWithoutAnEntryOfItsOwnIsNamed) {
  for (const bool async : {false, true}) {
    options_.checkpoint.async = async;
    for (forgets_ = 0; forgets_ < 2; ++forgets_) {
      const absl::Status saved = TrainTo(3, 2).status;
      EXPECT_EQ(saved.code(), absl::StatusCode::kInvalidArgument) << saved;
      EXPECT_TRUE(absl::StrContains(saved.message(), absl::StrCat("rank ", forgets_,
                                                                  " has no entry of its own under "
                                                                  "'counter', and rank ",
                                                                  1 - forgets_, " has one")))
          << saved;
    }
  }
}

TEST_F(ComponentsTest, CallbacksHearOfAFailureBeforeTheStart) {
  ASSERT_TRUE(TrainTo(3, 1).status.ok());
  for (const bool dry_run : {false, true}) {
    for (const bool refuses : {false, true}) {
      SCOPED_TRACE(absl::StrCat("dry run: ", dry_run, ", the component refuses: ", refuses));
      options_.dry_run = dry_run;
      refuses_ = refuses;
      const auto first = std::make_shared<Listener>("first");
      const auto second = std::make_shared<Listener>("second", /*fails=*/!refuses);
      const auto third = std::make_shared<Listener>("third");
      options_.callbacks = {first, second, third};
      const std::string error(TrainTo(5, 1).status.message());
      EXPECT_TRUE(
          absl::StrContains(error, refuses ? "counter: I refuse" : "callback second: broken"))
          << error;
      const std::vector<std::string> heard = {"set_up", error};
      EXPECT_EQ(first->heard, heard);
      EXPECT_EQ(second->heard, heard);
      EXPECT_EQ(third->heard, refuses ? heard : std::vector<std::string>());
    }
  }
}

TEST_F(ComponentsTest, NamesThatCannotBeAreRefused) {
  for (const auto& [name, word] : std::map<std::string, std::string>{
           {"model", "one of the trainer's"},
           {"per_rank", "one of the trainer's"},
           {"a/b", "slash"},
           {"a\xffz", "component 'a\\xffz' has a name that is not"},
           {std::string("a\0z", 3), "'a\\x00z' has a name that has"}}) {
    name_ = name;
    const absl::Status refused = TrainTo(1, 1).status;
    EXPECT_TRUE(absl::StrContains(refused.message(), word)) << refused;
  }
  // Ranks would wait for each other.
  name_ = "counter";
  of_rank_1_ = "_b";
  const absl::Status refused = TrainTo(1, 2).status;
  EXPECT_TRUE(absl::StrContains(refused.message(), "counter_b")) << refused;
}

// The first save would refuse it, after an epoch.
TEST_F(ComponentsTest, ATasksNameIsUtf8) {
  RunRanks(1, [&](const session::Session& session) {
    Task task = LineTask();
    task.name = "line\xff";
    const absl::Status refused = Train(session, task, Halves(640), Halves(60), options_).status();
    EXPECT_TRUE(
        absl::StrContains(refused.message(), "task 'line\\xff' has a name that is not UTF-8"))
        << refused;
  });
}

// Has a buffer of each rank's own, which counts in forward.
struct Drifting : torch::nn::Module {
  Drifting() {
    at::NoGradGuard no_grad;
    linear->weight.fill_(0.1);
    linear->bias.zero_();
  }
  at::Tensor forward(const at::Tensor& x) {
    if (is_training()) drift.add_(x.detach().mean());
    return linear->forward(x + drift);
  }
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(2, 2))};
  at::Tensor drift = register_buffer("drift", at::zeros({}));
};

TEST_F(ComponentsTest, BuffersOfEachRankAreRestored) {
  options_.data_parallel.broadcast_buffers = false;
  const auto train = [&](const std::string& folder, int64_t step, int world_size) {
    options_.checkpoint.manager.directory = folder_ + folder;
    options_.stop_at_step = step;
    std::vector<at::Tensor> parameters;
    RunRanks(world_size, [&](const session::Session& session) {
      const auto net = std::make_shared<Drifting>();
      const auto report =
          Train(session, Classification("drifting", net), Halves(640), Halves(60), options_);
      ASSERT_TRUE(report.ok()) << report.status();
      if (!session.is_main()) return;
      for (const at::Tensor& parameter : net->parameters()) {
        parameters.push_back(parameter.detach().clone());
      }
    });
    return parameters;
  };
  const std::vector<at::Tensor> whole = train("/whole", 7, 2);
  train("/stopped", 3, 2);
  const std::vector<at::Tensor> resumed = train("/stopped", 7, 2);
  ASSERT_EQ(whole.size(), 2);
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_TRUE(at::equal(resumed[i], whole[i])) << i;
  testing::internal::CaptureStderr();
  train("/stopped", 9, 3);
  const std::string printed = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(
      absl::StrContains(printed, "rank had of its own in buffers: saved with a world size of 2"))
      << printed;
}

TEST_F(ComponentsTest, InAnotherWorldPowerSgdGoesOnWithoutItsErrors) {
  options_.comm_hook.name = "powersgd";
  options_.comm_hook.implementations.Mutable<hooks::PowerSgdOptions>("powersgd") = {
      .start_iter = 2, .min_compression_rate = 0.1};
  ASSERT_TRUE(TrainTo(4, 2).status.ok());
  auto state = checkpoint::Manager::Load(folder_ + "/epoch_0_step_4.pt");
  ASSERT_TRUE(state.ok()) << state.status();
  const auto hook = state->root.at("comm_hook").toGenericDict();
  EXPECT_EQ(hook.at("iteration").toInt(), 4);
  EXPECT_FALSE(hook.at("buckets").toGenericDict().empty());
  ASSERT_EQ(state->per_rank.size(), 2);
  EXPECT_FALSE(state->per_rank.at(1).at("comm_hook").toGenericDict().empty());

  const Result result = TrainTo(6, 3);
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_TRUE(absl::StrContains(result.printed,
                                "rank had of its own in comm_hook: saved with a world size of 2"))
      << result.printed;
  state = checkpoint::Manager::Load(folder_ + "/epoch_0_step_6.pt");
  ASSERT_TRUE(state.ok()) << state.status();
  EXPECT_EQ(state->root.at("comm_hook").toGenericDict().at("iteration").toInt(), 6);
  // One process has no hook.
  const Result alone = TrainTo(7, 1);
  ASSERT_TRUE(alone.status.ok()) << alone.status;
  EXPECT_EQ(alone.unclaimed, (std::vector<std::string>{"comm_hook", "per_rank/comm_hook"}));
}

// The same bits with the state of the hook, and others without any part of it.
TEST_F(ComponentsTest, AllOfPowerSgdsStateCounts) {
  options_.comm_hook.name = "powersgd";
  options_.comm_hook.implementations.Mutable<hooks::PowerSgdOptions>("powersgd") = {
      .start_iter = 2, .min_compression_rate = 0.1};
  const auto train = [&](const std::string& folder, int64_t step,
                         const std::vector<std::string>& left_out) {
    options_.checkpoint.manager.directory = folder_ + folder;
    options_.checkpoint.save.callback = [left_out](checkpoint::State& state) {
      for (const std::string& key : left_out) EXPECT_EQ(state.root.erase(key), 1);
    };
    const Result result = TrainTo(step, 2);
    EXPECT_TRUE(result.status.ok()) << result.status;
    return result.parameters;
  };
  const std::vector<at::Tensor> whole = train("/whole", 9, {});
  for (const std::vector<std::string>& left_out :
       std::vector<std::vector<std::string>>{{}, {"per_rank"}, {"per_rank", "comm_hook"}}) {
    const std::string folder = absl::StrCat("/stopped", left_out.size());
    SCOPED_TRACE(folder);
    train(folder, 5, left_out);
    const std::vector<at::Tensor> resumed = train(folder, 9, {});
    ASSERT_EQ(resumed.size(), whole.size());
    bool same = true;
    for (size_t i = 0; i < whole.size(); ++i) same = same && at::equal(resumed[i], whole[i]);
    EXPECT_EQ(same, left_out.empty());
  }
}

// With a sharded optimizer, no rank has the whole of its state.
TEST_F(ComponentsTest, AFormatThatAllRanksWriteHasTheSameState) {
  takes_all_ = true;
  options_.optimizer = {.name = "adamw", .lr = 0.05};
  const auto bits = [](const Result& result) {
    EXPECT_TRUE(result.status.ok()) << result.status;
    std::vector<at::Tensor> copies;
    for (const at::Tensor& parameter : result.parameters) copies.push_back(parameter.detach());
    return copies;
  };
  for (const int64_t stage : {0, 1, 2}) {
    std::vector<std::vector<at::Tensor>> same_world, other_world;
    for (const std::string format : {"pt", "sharded"}) {
      SCOPED_TRACE(absl::StrCat("stage ", stage, ", ", format));
      options_.zero.stage = stage;
      options_.checkpoint.manager.format = format;
      options_.checkpoint.manager.directory = absl::StrCat(folder_, "/", format, stage);
      if (format == "pt") {
        options_.checkpoint.resume = "";
        same_world.push_back(bits(TrainTo(7, 2)));
        std::filesystem::remove_all(options_.checkpoint.manager.directory);
      }
      options_.checkpoint.resume = "auto";
      ASSERT_TRUE(TrainTo(4, 2).status.ok());
      std::filesystem::copy(options_.checkpoint.manager.directory,
                            options_.checkpoint.manager.directory + "_copy",
                            std::filesystem::copy_options::recursive);
      const Result resumed = TrainTo(7, 2);
      same_world.push_back(bits(resumed));
      EXPECT_EQ(resumed.count, (std::vector<int64_t>{7, 7}));
      options_.checkpoint.manager.directory += "_copy";
      const Result elsewhere = TrainTo(7, 3);
      other_world.push_back(bits(elsewhere));
      EXPECT_EQ(elsewhere.ranks_loaded, (std::vector<int>{2, 2, 2}));
      EXPECT_FALSE(absl::StrContains(elsewhere.printed, "without what the checkpoint has"))
          << elsewhere.printed;
    }
    for (const auto* results : {&same_world, &other_world}) {
      for (const std::vector<at::Tensor>& result : *results) {
        ASSERT_EQ(result.size(), results->front().size());
        for (size_t i = 0; i < result.size(); ++i) {
          EXPECT_TRUE(at::equal(result[i], results->front()[i])) << "stage " << stage;
        }
      }
    }
  }
}

// After a resume in another world.
// As where a model is moved to bfloat16 between two runs. ZeRO keeps the state in float32.
TEST_F(ComponentsTest, WhatALoadConvertsIsSaid) {
  struct Moved : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) {
      return linear->forward(x.to(linear->weight.scalar_type())).to(at::kFloat);
    }
    torch::nn::Linear linear{register_module("linear", torch::nn::Linear(2, 2))};
  };
  options_.optimizer = {.name = "adamw", .lr = 0.01};
  const auto train = [&](at::ScalarType dtype, int64_t stage, int64_t step) {
    testing::internal::CaptureStderr();
    RunRanks(2, [&](const session::Session& session) {
      const auto module = std::make_shared<Moved>();
      module->to(dtype);
      TrainerOptions options = options_;
      options.zero.stage = stage;
      options.stop_at_step = step;
      const absl::Status trained =
          Train(session, Classification("line", module), Halves(640), Halves(60), options).status();
      EXPECT_TRUE(trained.ok()) << trained;
    });
    return testing::internal::GetCapturedStderr();
  };
  const auto says = [](const std::string& printed, const std::string& what) {
    return absl::StrContains(printed, absl::StrCat("resumed with ", what));
  };
  const std::string model =
      "model state: 2 converted: linear.weight (model BFloat16, checkpoint Float)";
  const std::string state = "optimizer state converted from ";
  EXPECT_FALSE(absl::StrContains(train(at::kFloat, 0, 3), "converted"));
  std::string printed = train(at::kBFloat16, 1, 5);
  EXPECT_TRUE(says(printed, model)) << printed;
  EXPECT_FALSE(says(printed, "optimizer state")) << printed;
  printed = train(at::kBFloat16, 0, 7);
  EXPECT_FALSE(says(printed, "model state")) << printed;
  EXPECT_TRUE(says(printed, state + "Float to BFloat16, as exp_avg of linear.weight")) << printed;
  printed = train(at::kBFloat16, 1, 9);
  EXPECT_TRUE(says(printed, state + "BFloat16 to Float, as exp_avg of linear.weight")) << printed;
  EXPECT_FALSE(absl::StrContains(train(at::kBFloat16, 1, 11), "converted"));
}

TEST(GeneratorsTest, EachRankHasASeedOfItsOwn) {
  std::mutex mutex;  // ranks as threads share torch's generator
  std::set<double> drawn;
  RunRanks(3, [&](const session::Session& session) {
    Position position;
    position.epoch = 1;
    position.step = 10;
    Generators generators(session, position);
    LoadNotes notes;
    const std::lock_guard<std::mutex> lock(mutex);
    const absl::Status loaded = generators.load_state_dict(State(), notes);
    EXPECT_TRUE(loaded.ok()) << loaded;
    drawn.insert(at::rand({}, at::kDouble).item<double>());
  });
  EXPECT_EQ(drawn.size(), 3u);
}

}  // namespace
}  // namespace ddp::trainer
