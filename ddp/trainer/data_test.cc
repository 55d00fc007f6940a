// Training on data with random numbers, streams and samplers: its bits do not depend on workers,
// stops and ranks.
#include <algorithm>
#include <cmath>
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
#include "absl/strings/str_split.h"
#include "checkpoint/manager.h"
#include "ddp/data/concat.h"
#include "ddp/data/example_dataset.h"
#include "ddp/data/random_tensors.h"
#include "ddp/data/stream.h"
#include "ddp/trainer/accelerator.h"
#include "ddp/trainer/trainer_testing.h"
#include "gtest/gtest.h"

namespace ddp::trainer {
namespace {

// Halves under noise of the examples' random numbers.
class Noisy : public data::RandomDatasetOf<data::Batch> {
 public:
  explicit Noisy(int64_t n) : clean_(n) {}
  int64_t size() const override { return clean_.size(); }
  data::Batch Get(absl::Span<const int64_t> indices,
                  absl::Span<data::Random> random) const override {
    data::Batch batch = clean_.Get(indices);
    for (size_t i = 0; i < random.size(); ++i) {
      batch.input[static_cast<int64_t>(i)].add_(data::Randn({2}, random[i]));
    }
    return batch;
  }

 private:
  const Halves clean_;
};

// Halves in shards of 50, 7 and 111 examples.
class Shards : public data::StreamOf<std::pair<at::Tensor, int64_t>, data::Batch> {
 public:
  explicit Shards(bool can_seek) : seeks_(can_seek) {}
  int64_t num_shards() const override { return 3; }
  int64_t shard_size(int64_t shard) const override { return kSizes[shard]; }
  bool can_seek() const override { return seeks_; }
  std::unique_ptr<data::ShardReaderOf<std::pair<at::Tensor, int64_t>>> Open(
      int64_t shard, int64_t offset) const override {
    struct Reader : data::ShardReaderOf<std::pair<at::Tensor, int64_t>> {
      std::pair<at::Tensor, int64_t> Next() override {
        const data::Batch batch = all.Get({index++});
        return {batch.input[0], batch.target[0].item<int64_t>()};
      }
      Halves all{168};
      int64_t index = 0;
    };
    auto reader = std::make_unique<Reader>();
    for (int64_t before = 0; before < shard; ++before) reader->index += kSizes[before];
    reader->index += offset;
    return reader;
  }
  data::Batch Collate(std::vector<std::pair<at::Tensor, int64_t>> examples,
                      absl::Span<const int64_t> indices) const override {
    auto [input, target] = data::Collate(std::move(examples), indices);
    return {input, target};
  }

 private:
  static constexpr int64_t kSizes[] = {50, 7, 111};
  const bool seeks_;
};

// A training set, and the sampler of its order (null: that of `shuffle`).
struct Source {
  std::shared_ptr<const data::AnyDataset> data;
  data::SharedSampler sampler;
};

Source Make(const std::string& kind) {
  if (kind == "augmented") return {std::make_shared<Noisy>(168), nullptr};
  if (kind == "mixture") {
    return {
        data::ConcatDataset::Create({std::make_shared<Noisy>(40), std::make_shared<Halves>(200)})
            .value(),
        data::MixtureSampler({{.sampler = data::RandomSampler(40, 1).value(), .weight = 2},
                              {.sampler = data::RandomSampler(200, 1).value(), .weight = 3}},
                             {.num_samples = 168, .seed = 4})
            .value()};
  }
  auto stream = std::make_shared<Shards>(/*can_seek=*/kind == "stream");
  data::SharedSampler sampler = stream->MakeSampler({.buffer_size = 30, .seed = 4}).value();
  return {std::move(stream), std::move(sampler)};
}

TrainerOptions Options(const Source& source) {
  TrainerOptions options = Quiet();
  options.batch_size = 8;
  options.seed = 5;
  options.optimizer.lr = 0.05;
  options.sampler = source.sampler;
  return options;
}

// The inputs that each rank has trained on.
class Trained {
 public:
  Task Record(Task task) {
    task.forward = [this, forward = task.forward, module = task.module](const at::Tensor& input) {
      if (module->is_training()) {
        const std::lock_guard lock(mutex_);
        for (int64_t i = 0; i < input.size(0); ++i) {
          rows_.insert({input[i][0].item<float>(), input[i][1].item<float>()});
        }
      }
      return forward(input);
    };
    return task;
  }
  const std::multiset<std::pair<float, float>>& rows() const { return rows_; }

 private:
  std::mutex mutex_;
  std::multiset<std::pair<float, float>> rows_;
};

// Trains on `world_size` ranks; returns rank 0's parameters.
std::vector<at::Tensor> TrainOn(int world_size, const Source& source, const TrainerOptions& options,
                                Trained* trained = nullptr) {
  std::vector<at::Tensor> parameters;
  RunRanks(world_size, [&](const session::Session& session) {
    Task task = NetTask();
    if (trained != nullptr) task = trained->Record(std::move(task));
    const auto report = Train(session, task, *source.data, Halves(60), options);
    ASSERT_TRUE(report.ok()) << report.status();
    if (!session.is_main()) return;
    for (const at::Tensor& parameter : task.module->parameters()) {
      parameters.push_back(parameter.detach().clone());
    }
  });
  return parameters;
}

void ExpectSame(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  ASSERT_FALSE(a.empty());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i].equal(b[i])) << "parameter " << i;
}

class DataTest : public testing::TestWithParam<std::string> {
 protected:
  std::string Folder() const {
    const std::string folder = absl::StrCat(testing::TempDir(), "/data_", GetParam());
    std::filesystem::remove_all(folder);
    return folder;
  }
};

// Of an example's place in the data set, whatever rank evaluates it, and of the run's seed.
TEST(RandomNumbersTest, OfEvaluationsAreTheExamples) {
  const auto evaluated = [](int world_size, int64_t seed, bool own_loop) {
    std::vector<std::pair<int64_t, float>> values;  // by index
    RunRanks(world_size, [&](const session::Session& session) {
      TrainerOptions options = Quiet();
      options.seed = seed;
      options.num_workers = 2;
      options.eval_batch_size = 4;
      const Noisy test(11);
      if (!own_loop) {
        const Task task = LineTask();
        {
          const at::NoGradGuard no_grad;  // else its two outputs are equal
          task.module->parameters()[0].copy_(at::arange(4, at::kFloat).view({2, 2}));
        }
        const absl::StatusOr<Evaluation> evaluation =
            Evaluate(session, task, test, {.batch_size = 4}, nullptr, seed);
        ASSERT_TRUE(evaluation.ok()) << evaluation.status();
        if (session.is_main()) values = {{0, static_cast<float>(evaluation->loss)}};
        return;
      }
      const auto accelerator = Accelerator::Create(session, "line", options);
      ASSERT_TRUE(accelerator.ok()) << accelerator.status();
      const auto loader = (*accelerator)->EvaluationLoader<data::Batch>(test);
      ASSERT_TRUE(loader.ok()) << loader.status();
      std::vector<std::pair<std::vector<int64_t>, at::Tensor>> inputs;
      while (true) {
        const auto batch = (*loader)->Next();
        ASSERT_TRUE(batch.ok()) << batch.status();
        if (!batch->has_value()) break;
        inputs.emplace_back((*loader)->indices(), (*batch)->input.select(1, 0).contiguous());
      }
      const auto all = (*accelerator)->GatherForMetrics(std::move(inputs));
      ASSERT_TRUE(all.ok()) << all.status();
      if (!session.is_main()) return;
      for (int64_t i = 0; i < all->size(0); ++i) values.emplace_back(i, (*all)[i].item<float>());
    });
    return values;
  };
  const auto one = evaluated(1, 7, /*own_loop=*/true);
  EXPECT_EQ(one.size(), 11);
  EXPECT_EQ(evaluated(2, 7, true), one);
  EXPECT_EQ(evaluated(3, 7, true), one);
  EXPECT_NE(evaluated(1, 8, true), one);
  const auto loss = [&](int world_size, int64_t seed) {
    const auto values = evaluated(world_size, seed, /*own_loop=*/false);
    return values.empty() ? -1 : values[0].second;
  };
  EXPECT_NEAR(loss(1, 7), loss(2, 7), 1e-6);
  EXPECT_NEAR(loss(1, 7), loss(3, 7), 1e-6);
  EXPECT_GT(std::abs(loss(1, 7) - loss(1, 8)), 1e-4);
}

INSTANTIATE_TEST_SUITE_P(Kinds, DataTest,
                         testing::Values("augmented", "stream", "unseekable", "mixture"),
                         [](const auto& info) { return info.param; });

TEST_P(DataTest, BitsDoNotDependOnWorkers) {
  const Source source = Make(GetParam());
  TrainerOptions options = Options(source);
  options.num_workers = 0;
  const auto alone = TrainOn(2, source, options);
  for (const int workers : {1, 4}) {
    options.num_workers = workers;
    options.prefetch_factor = workers;
    ExpectSame(TrainOn(2, source, options), alone);
  }
}

TEST_P(DataTest, AStoppedRunEndsWithTheBitsOfOneThatWasNot) {
  const Source source = Make(GetParam());
  TrainerOptions options = Options(source);
  const auto whole = TrainOn(2, source, options);
  for (const int64_t stop : {1, 6, 17}) {  // within the first epoch, and the second
    options.checkpoint.manager.directory = Folder();
    options.checkpoint.resume = "auto";
    options.stop_at_step = stop;
    options.num_workers = 0;
    TrainOn(2, source, options);
    options.stop_at_step = 0;
    options.num_workers = 3;
    ExpectSame(TrainOn(2, source, options), whole);
  }
}

TEST_P(DataTest, AnotherOrderWithinAnEpochIsRefused) {
  const Source source = Make(GetParam());
  TrainerOptions options = Options(source);
  options.checkpoint.manager.directory = Folder();
  options.stop_at_step = 3;
  TrainOn(2, source, options);
  options.stop_at_step = 0;
  options.checkpoint.resume = "auto";
  options.sampler = data::SequentialSampler(source.data->size()).value();
  RunRanks(2, [&](const session::Session& session) {
    const std::string message(
        Train(session, NetTask(), *source.data, Halves(60), options).status().message());
    EXPECT_TRUE(absl::StrContains(message, "in another order than that of the checkpoint"))
        << message;
  });
}

// Also in worlds of other sizes each example of the epoch is trained once, with the same noise.
TEST_P(DataTest, RanksMayChange) {
  const Source source = Make(GetParam());
  TrainerOptions options = Options(source);
  options.epochs = 1;
  Trained whole, parts;
  TrainOn(1, source, options, &whole);
  options.checkpoint.manager.directory = Folder();
  options.checkpoint.resume = "auto";
  options.stop_at_step = 2;
  TrainOn(4, source, options, &parts);
  options.stop_at_step = 4;
  TrainOn(2, source, options, &parts);
  EXPECT_EQ(parts.rows().size(), 2 * 4 * 8 + 2 * 2 * 8);
  options.stop_at_step = 0;
  TrainOn(3, source, options, &parts);
  EXPECT_EQ(parts.rows(), whole.rows());
}

// Also without progress and in a loop of one's own, once for all ranks.
TEST(DataStreamTest, OneThatCannotSeekIsReported) {
  for (const bool can_seek : {true, false}) {
    const Source source = Make(can_seek ? "stream" : "unseekable");
    TrainerOptions options = Options(source);
    options.max_steps = 1;
    const auto prepare = [&](const session::Session& session) {
      const auto accelerator = Accelerator::Create(session, "net", options);
      ASSERT_TRUE(accelerator.ok()) << accelerator.status();
      const auto loader = (*accelerator)->PrepareLoader<data::Batch>(*source.data);
      EXPECT_TRUE(loader.ok()) << loader.status();
    };
    for (const bool in_own_loop : {false, true}) {
      SCOPED_TRACE(in_own_loop);
      testing::internal::CaptureStderr();
      if (in_own_loop) {
        RunRanks(2, prepare);
      } else {
        TrainOn(2, source, options);
      }
      const std::vector<std::string> parts =
          absl::StrSplit(testing::internal::GetCapturedStderr(),
                         "Shards is a stream that cannot seek: one worker");
      EXPECT_EQ(parts.size(), can_seek ? 1 : 2);
    }
  }
}

// Draws from the generator that all threads share, for examples from `first` on.
class Careless : public Halves {
 public:
  explicit Careless(int64_t n, int64_t first = 0) : Halves(n), first_(first) {}
  data::Batch Get(absl::Span<const int64_t> indices) const override {
    data::Batch batch = Halves::Get(indices);
    if (*std::max_element(indices.begin(), indices.end()) >= first_) {
      batch.input += at::randn_like(batch.input);
    }
    return batch;
  }

 private:
  const int64_t first_;
};

class Ragged : public data::ExampleDatasetOf<at::Tensor> {
 public:
  int64_t size() const override { return 64; }
  at::Tensor Get(int64_t index) const override { return at::ones({index == 40 ? 3 : 2}); }
};

TEST(DataRefusalTest, OfExamplesOfSeveralShapes) {
  RunRanks(2, [&](const session::Session& session) {
    auto line = std::make_shared<Line>();
    const Task task = TaskOf<at::Tensor>("line", line, [line](at::Tensor& batch, const auto&) {
      return StepOutput{.loss = Mean(line->forward(batch).pow(2).mean(), batch.size(0))};
    });
    const absl::Status status = Train(session, task, Ragged(), Ragged(), Quiet()).status();
    EXPECT_TRUE(absl::StrContains(status.message(), "[3] in example 40") ||
                absl::StrContains(status.message(), "has shape [3] in example 40"))
        << status;
  });
}

TEST(DataRefusalTest, OfADataSetThatDrawsFromTorchsGenerator) {
  RunRanks(2, [&](const session::Session& session) {
    const std::string message(
        Train(session, LineTask(), Careless(100), Halves(60), Quiet()).status().message());
    EXPECT_TRUE(absl::StrContains(message, "Careless draws from torch's global generator in Get"))
        << message;
  });
}

TEST(DataRefusalTest, OfADataSetThatDrawsForSomeExamplesOnly) {
  TrainerOptions options = Quiet();
  options.shuffle = false;
  RunRanks(2, [&](const session::Session& session) {
    const absl::Status refused =
        Train(session, LineTask(), Careless(100, /*first=*/40), Halves(60), options).status();
    EXPECT_TRUE(absl::StrContains(refused.message(), "Careless draws")) << refused;
  });
}

// Its values would depend on the workers.
TEST(DataRefusalTest, OfADataSetForEvaluationThatDrawsFromTorchsGenerator) {
  for (const int64_t first : {0, 30}) {
    const Careless careless(60, first);
    for (const bool validates : {false, true}) {
      RunRanks(2, [&](const session::Session& session) {
        const Halves train(100), test(60);
        const absl::Status refused =
            validates ? Train(session, LineTask(), train, careless, test, Quiet()).status()
                      : Train(session, LineTask(), train, careless, Quiet()).status();
        EXPECT_TRUE(absl::StrContains(refused.message(), "Careless draws")) << refused;
      });
    }
  }
  // A run that trains nothing.
  TrainerOptions options = Quiet();
  options.checkpoint.manager.directory = absl::StrCat(testing::TempDir(), "/careless");
  std::filesystem::remove_all(options.checkpoint.manager.directory);
  for (const bool eval_only : {false, true}) {
    options.eval_only = eval_only;
    options.checkpoint.resume = eval_only ? "auto" : "";
    RunRanks(2, [&](const session::Session& session) {
      const Careless test(60, /*first=*/eval_only ? 0 : 60);
      const absl::Status status = Train(session, LineTask(), Halves(100), test, options).status();
      EXPECT_EQ(absl::StrContains(status.message(), "Careless draws"), eval_only) << status;
      EXPECT_EQ(status.ok(), !eval_only) << status;
    });
  }
}

// What a loop of one's own says of a training set.
std::string MessageOfLoop(const session::Session& session, const data::AnyDataset& train,
                          const TrainerOptions& options = Quiet()) {
  const auto accelerator = Accelerator::Create(session, "line", options);
  if (!accelerator.ok()) return std::string(accelerator.status().message());
  return std::string((*accelerator)->PrepareLoader<data::Batch>(train).status().message());
}

TEST(DataRefusalTest, OfADataSetThatDrawsFromTorchsGeneratorInALoop) {
  RunRanks(2, [&](const session::Session& session) {
    const std::string message = MessageOfLoop(session, Careless(100));
    EXPECT_TRUE(absl::StrContains(message, "Careless draws from torch's global generator in Get"))
        << message;
  });
}

class Printed : public Halves {
 public:
  Printed(int64_t n, std::string fingerprint) : Halves(n), fingerprint_(std::move(fingerprint)) {}
  std::string Fingerprint() const override { return fingerprint_; }

 private:
  const std::string fingerprint_;
};

// It may read samples.
TEST(DataFingerprintTest, IsComputedOnceInARun) {
  struct Counted : Halves {
    using Halves::Halves;
    std::string Fingerprint() const override {
      ++calls;
      return "aa";
    }
    mutable int calls = 0;
  };
  RunRanks(1, [&](const session::Session& session) {
    const Counted train(100), test(60);
    TrainerOptions options = Quiet();
    options.max_steps = 1;
    const auto report = Train(session, LineTask(), train, test, options);
    EXPECT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(train.calls, 1);
    EXPECT_EQ(test.calls, 1);
  });
}

// As of one host that has another copy of the files.
TEST(DataRefusalTest, OfRanksWithOtherContents) {
  for (const bool trains : {true, false}) {
    RunRanks(2, [&](const session::Session& session) {
      const Printed mine(100, session.rank() == 0 ? "aa" : "bb"), same(100, "cc");
      const std::string message(
          Train(session, LineTask(), trains ? mine : same, trains ? same : mine, Quiet())
              .status()
              .message());
      EXPECT_TRUE(absl::StrContains(
          message,
          absl::StrCat(trains ? "training" : "test",
                       " data=100 examples of fingerprint aa is not the same on all ranks: rank 0 "
                       "has 100 examples of fingerprint aa, rank 1 has 100 examples of fingerprint "
                       "bb")))
          << message;
    });
  }
}

TEST(DataRefusalTest, OfRanksWithOtherContentsInALoop) {
  RunRanks(2, [&](const session::Session& session) {
    const std::string message =
        MessageOfLoop(session, Printed(100, session.rank() == 0 ? "aa" : "bb"));
    EXPECT_TRUE(absl::StrContains(
        message, "training data=100 examples of fingerprint aa is not the same on all ranks"))
        << message;
    TrainerOptions options = Quiet();
    options.sampler = session.rank() == 0 ? data::SequentialSampler(100).value()
                                          : data::RandomSampler(100, 1).value();
    const std::string order = MessageOfLoop(session, Halves(100), options);
    EXPECT_TRUE(absl::StrContains(order, "sampler=of fingerprint ")) << order;
  });
}

TEST(DataRefusalTest, OfOtherContentsWithinAnEpoch) {
  TrainerOptions options = Quiet();  // 7 steps in each of two epochs
  options.checkpoint.manager.directory = absl::StrCat(testing::TempDir(), "/other_contents");
  std::filesystem::remove_all(options.checkpoint.manager.directory);
  options.checkpoint.resume = "auto";
  const auto train_to = [&](int64_t step, const std::string& fingerprint) {
    options.stop_at_step = step;
    std::string message;
    RunRanks(1, [&](const session::Session& session) {
      const Printed train(100, fingerprint);
      message = Train(session, LineTask(), train, Halves(60), options).status().message();
    });
    return message;
  };
  const std::string refusal =
      "the training set has other contents than that of the checkpoint, or the same in another "
      "order: its fingerprint is bb, not aa";
  EXPECT_EQ(train_to(3, "aa"), "");
  EXPECT_TRUE(absl::StrContains(train_to(4, "bb"), refusal)) << train_to(4, "bb");
  EXPECT_EQ(train_to(4, "aa"), "");
  // Data without a fingerprint are not those that have one.
  EXPECT_TRUE(absl::StrContains(train_to(5, ""), "its fingerprint is none, not aa"));
  EXPECT_EQ(train_to(7, "aa"), "");
  // The next epoch may have others.
  EXPECT_EQ(train_to(9, "aa"), "");
  EXPECT_TRUE(absl::StrContains(train_to(10, "bb"), refusal)) << train_to(10, "bb");
  std::filesystem::remove_all(options.checkpoint.manager.directory);
  EXPECT_EQ(train_to(3, ""), "");
  EXPECT_TRUE(absl::StrContains(train_to(4, "aa"), "its fingerprint is aa, not none"));
  EXPECT_EQ(train_to(4, ""), "");
  // What an earlier version saved does not tell.
  options.checkpoint.save.callback = [](checkpoint::State& state) {
    (void)state.root.erase("data_fingerprint");
  };
  EXPECT_EQ(train_to(5, ""), "");
  EXPECT_EQ(train_to(6, "aa"), "");
}

std::string Message(const TrainerOptions& options) {
  std::string message;
  RunRanks(1, [&](const session::Session& session) {
    message = Train(session, LineTask(), Halves(100), Halves(60), options).status().message();
  });
  return message;
}

TEST(DataSamplerTest, WithoutShuffleTheOrderIsTheDataSets) {
  TrainerOptions options = Quiet();
  options.shuffle = false;
  options.epochs = 1;
  options.max_steps = 2;
  options.batch_size = 5;
  Trained trained;
  TrainOn(2, {std::make_shared<Halves>(100), nullptr}, options, &trained);
  const at::Tensor first =
      Halves(20).Get({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19}).input;
  std::multiset<std::pair<float, float>> expected;
  for (int64_t i = 0; i < 20; ++i) {
    expected.insert({first[i][0].item<float>(), first[i][1].item<float>()});
  }
  EXPECT_EQ(trained.rows(), expected);
}

TEST(DataSamplerTest, AnEndlessOneEndsWithMaxSteps) {
  const Source source = {std::make_shared<Halves>(10),
                         data::InfiniteSampler(data::RandomSampler(10, 1).value()).value()};
  TrainerOptions options = Options(source);
  EXPECT_TRUE(absl::StrContains(Message(options), "max_steps")) << Message(options);
  options.max_steps = 7;
  EXPECT_TRUE(absl::StrContains(Message(options), "epochs=2 must be 1")) << Message(options);
  options.epochs = 1;
  options.schedule.warmup_epochs = 1;
  EXPECT_TRUE(absl::StrContains(Message(options), "schedule.warmup_epochs=1 counts epochs, but"))
      << Message(options);
  options.schedule = {.name = "step"};
  EXPECT_TRUE(absl::StrContains(Message(options), "schedule.name=step decays by epochs, but"))
      << Message(options);
  options.schedule.name = "cosine";
  Trained trained;
  TrainOn(2, source, options, &trained);
  EXPECT_EQ(trained.rows().size(), 7 * 2 * 8);  // 11 passes and two examples
  const std::set<std::pair<float, float>> examples(trained.rows().begin(), trained.rows().end());
  EXPECT_EQ(examples.size(), 10);
  for (const auto& example : examples) {
    EXPECT_GE(trained.rows().count(example), 11);
    EXPECT_LE(trained.rows().count(example), 12);
  }
  options.shuffle = false;
  EXPECT_TRUE(absl::StrContains(Message(options), "shuffle=false has no effect beside"))
      << Message(options);
}

TEST(DataSamplerTest, OrdersTheWholeTrainingSet) {
  TrainerOptions options = Quiet();
  options.sampler = data::RandomSampler(100, 1).value();
  options.validation_size = 10;
  EXPECT_TRUE(absl::StrContains(Message(options), "does not go with the program's own sampler"))
      << Message(options);
}

TEST(DataSamplerTest, RanksMustHaveOneOrder) {
  RunRanks(2, [&](const session::Session& session) {
    TrainerOptions options = Quiet();
    options.sampler = data::RandomSampler(100, /*seed=*/session.rank()).value();
    const std::string message(
        Train(session, LineTask(), Halves(100), Halves(60), options).status().message());
    EXPECT_TRUE(absl::StrContains(message, "sampler")) << message;
  });
}

}  // namespace
}  // namespace ddp::trainer
