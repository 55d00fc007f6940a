// What a loop with an Accelerator may do: losses that read another optimizer's model, a last step
// of fewer batches, logs amid steps, evaluations where a rank has no batch.

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "ddp/collective_status.h"
#include "ddp/trainer/accelerator.h"
#include "ddp/trainer/trainer_testing.h"
#include "gtest/gtest.h"

namespace ddp::trainer {
namespace {

using absl::StrContains;

class OwnLoopTest : public testing::Test {
 protected:
  OwnLoopTest()
      : folder_(absl::StrCat(testing::TempDir(), "/own_loop_",
                             testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::remove_all(folder_);
    options_ = Quiet();
    options_.optimizer = {.name = "sgd", .lr = 1, .momentum = 0.0};
  }

  // Rank 0's error; the others have the same.
  static absl::Status OnRanks(int world_size,
                              const std::function<absl::Status(const session::Session&)>& body) {
    absl::Status first;
    RunRanks(world_size, [&](const session::Session& session) {
      const absl::Status mine = CatchCollective("", [&] { return body(session); });
      const absl::Status shared = session.ShareFailure(mine);
      EXPECT_TRUE(mine.ok() || !shared.ok()) << mine;
      if (session.is_main()) first = shared;
    });
    return first;
  }

  // All of its weights are 1.
  static std::shared_ptr<Line> Ones() {
    auto line = std::make_shared<Line>();
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : line->parameters()) parameter.fill_(1);
    return line;
  }
  static double WeightOf(Line& line) {
    const at::NoGradGuard no_grad;
    return line.linear->weight[0][0].item<double>();
  }

  const std::string folder_;
  TrainerOptions options_;
};

// When the optimizers of a pair of models step.
enum class Order { kReadFirst, kReaderFirst, kTogether };

// As a GAN's: the reader's loss is what the other model makes of its output, by the module itself,
// or by its wrapper.
absl::Status TrainPair(const session::Session& session, const TrainerOptions& options,
                       std::shared_ptr<Line> read, std::shared_ptr<Line> reader, Order order,
                       bool by_wrapper) {
  DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "pair", options));
  DDP_ASSIGN_OR_RETURN(auto model, accelerator->Prepare(read));
  DDP_ASSIGN_OR_RETURN(auto other, accelerator->Prepare(reader, "other"));
  DDP_ASSIGN_OR_RETURN(AcceleratedOptimizer * of_read, accelerator->PrepareOptimizer(model));
  DDP_ASSIGN_OR_RETURN(AcceleratedOptimizer * of_reader, accelerator->PrepareOptimizer(other));
  const at::Tensor x = at::ones({1, 2});
  const auto judge = [&] { of_read->backward(Mean(model->forward(x).sum(), 1)); };
  const auto fool = [&] {
    const at::Tensor made = other->forward(x);
    const at::Tensor judged = by_wrapper ? model->forward(made) : read->forward(made);
    of_reader->backward(Mean(judged.sum(), 1));
  };
  const auto update = [](AcceleratedOptimizer& optimizer) {
    optimizer.step();
    optimizer.zero_grad();
  };
  for (int64_t batch = 0; batch < 2 * options.accumulate; ++batch) {
    const auto scope = accelerator->Accumulate();
    if (order == Order::kReaderFirst) {
      fool();
      update(*of_reader);
    }
    judge();
    if (order != Order::kTogether) update(*of_read);
    if (order != Order::kReaderFirst) fool();
    if (order == Order::kTogether) update(*of_read);
    if (order != Order::kReaderFirst) update(*of_reader);
  }
  return accelerator->End();
}

TEST_F(OwnLoopTest, ALossChangesNoGradientOfAnotherOptimizer) {
  for (const auto& [stage, views] :
       {std::pair(0, false), std::pair(0, true), std::pair(1, false), std::pair(2, false)}) {
    for (const int64_t accumulate : {1, 2}) {
      TrainerOptions options = options_;
      options.zero.stage = stage;
      options.data_parallel.gradient_as_bucket_view = views;
      options.accumulate = accumulate;
      const auto all_orders = [&](const session::Session& session) -> absl::Status {
        for (const Order order : {Order::kReadFirst, Order::kReaderFirst, Order::kTogether}) {
          for (const bool by_wrapper : {false, true}) {
            const auto read = Ones(), reader = Ones();
            DDP_RETURN_IF_ERROR(TrainPair(session, options, read, reader, order, by_wrapper));
            // The gradient of the one is 1, that of the other the sum of two of the one's weights.
            double weight = 1, of_reader = 1;
            for (int step = 0; step < 2; ++step) {
              double sum = 2 * weight * static_cast<double>(accumulate - 1);
              if (order == Order::kReadFirst) --weight;
              sum += 2 * weight;
              if (order != Order::kReadFirst) --weight;
              of_reader -= sum / static_cast<double>(accumulate);
            }
            const std::string what =
                absl::StrCat("stage ", options.zero.stage, ", accumulate ", accumulate, ", order ",
                             static_cast<int>(order), ", by_wrapper ", by_wrapper);
            EXPECT_NEAR(WeightOf(*read), weight, 1e-5) << what;
            EXPECT_NEAR(WeightOf(*reader), of_reader, 1e-5) << what;
          }
        }
        return absl::OkStatus();
      };
      const absl::Status done = OnRanks(2, all_orders);
      EXPECT_TRUE(done.ok()) << done;
    }
  }
}

// With two optimizers backward goes to one's parameters alone, with one it need not come to the
// wrapped model: then no hook of stage 2 runs on this rank.
TEST_F(OwnLoopTest, ABatchThatReachesNoParameterOnOneRank) {
  options_.zero.stage = 2;
  options_.data_parallel.find_unused_parameters = true;
  options_.accumulate = 2;
  for (const bool two_optimizers : {true, false}) {
    const absl::Status done = OnRanks(2, [&](const session::Session& session) -> absl::Status {
      DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "net", options_));
      const auto line = Ones(), second = Ones();
      DDP_ASSIGN_OR_RETURN(auto model, accelerator->Prepare(line));
      DDP_ASSIGN_OR_RETURN(AcceleratedOptimizer * optimizer, accelerator->PrepareOptimizer(model));
      if (two_optimizers) {
        DDP_ASSIGN_OR_RETURN(auto other, accelerator->Prepare(second, "other"));
        DDP_RETURN_IF_ERROR(accelerator->PrepareOptimizer(other).status());
      }
      const at::Tensor x = at::ones({1, 2}), unrelated = at::ones({1}).requires_grad_();
      for (int step = 0; step < 2; ++step) {
        for (const bool reaches : {session.rank() == 0, true}) {
          const auto scope = accelerator->Accumulate();
          const at::Tensor loss = reaches ? model->forward(x).sum() : (unrelated * 1).sum();
          optimizer->backward(Mean(loss, 1));
          optimizer->step();
          optimizer->zero_grad();
        }
      }
      // Three of the four batches of a step have the gradient 1.
      EXPECT_NEAR(WeightOf(*line), 1 - 2 * 0.75, 1e-5);
      return accelerator->End();
    });
    EXPECT_TRUE(done.ok()) << done;
  }
}

// If the count of the first step were taken for ever, the 16-bit gradients of the last ones would
// be infinite.
TEST_F(OwnLoopTest, TheGreatestCountSoFarScalesTheSums) {
  options_.comm_hook.name = "fp16_compress";
  const absl::Status done = OnRanks(2, [&](const session::Session& session) -> absl::Status {
    DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "line", options_));
    const auto line = Ones();
    DDP_ASSIGN_OR_RETURN(auto model, accelerator->Prepare(line));
    DDP_ASSIGN_OR_RETURN(AcceleratedOptimizer * optimizer, accelerator->PrepareOptimizer(model));
    double weight = 1;
    for (int step = 0; step < 4; ++step) {
      const auto scope = accelerator->Accumulate();
      const double count = step == 0 ? 4 : 1 << 15, gradient = step < 2 ? 1 : 1000;
      const at::Tensor mean = model->forward(at::ones({1, 2})).sum() * gradient;
      optimizer->backward(SumAndCount(mean * count, count));
      optimizer->step();
      optimizer->zero_grad();
      weight -= gradient;
      EXPECT_EQ(WeightOf(*line), weight) << step;
    }
    return accelerator->End();
  });
  EXPECT_TRUE(done.ok()) << done;
}

TEST_F(OwnLoopTest, PlateauNeedsNoLength) {
  options_.schedule.name = "plateau";
  options_.schedule.plateau = {.metric = "own", .factor = 0.5, .patience = 0};
  const absl::Status done = OnRanks(2, [&](const session::Session& session) -> absl::Status {
    DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "line", options_));
    const auto line = Ones();
    DDP_ASSIGN_OR_RETURN(auto model, accelerator->Prepare(line));
    DDP_ASSIGN_OR_RETURN(AcceleratedOptimizer * optimizer, accelerator->PrepareOptimizer(model));
    // The second value is no better than the first.
    for (const double weight : {0.0, -1.0, -1.5}) {
      const auto scope = accelerator->Accumulate();
      optimizer->backward(Mean(model->forward(at::ones({1, 2})).sum(), 1));
      optimizer->step();
      optimizer->zero_grad();
      EXPECT_EQ(WeightOf(*line), weight);
      DDP_RETURN_IF_ERROR(optimizer->scheduler().Evaluated({{"own", 1}}));
    }
    return accelerator->End();
  });
  EXPECT_TRUE(done.ok()) << done;
}

// Of a loop without a loader, which alone knows which batch is the last.
TEST_F(OwnLoopTest, TheLastBatchEndsAStepOfFewer) {
  options_.accumulate = 3;
  options_.checkpoint.manager.directory = folder_;
  const auto train = [&](bool says_so) {
    return OnRanks(2, [&](const session::Session& session) -> absl::Status {
      DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "line", options_));
      const auto line = Ones();
      DDP_ASSIGN_OR_RETURN(auto model, accelerator->Prepare(line));
      DDP_ASSIGN_OR_RETURN(AcceleratedOptimizer * optimizer, accelerator->PrepareOptimizer(model));
      for (int batch = 1; batch <= 5; ++batch) {
        const auto scope = accelerator->Accumulate(/*is_last=*/says_so && batch == 5);
        EXPECT_EQ(accelerator->sync_gradients(), batch == 3 || (says_so && batch == 5));
        optimizer->backward(Mean(model->forward(at::full({1, 2}, batch, at::kFloat)).sum(), 1));
        optimizer->step();
        optimizer->zero_grad();
        DDP_RETURN_IF_ERROR(accelerator->GoOn().status());
      }
      EXPECT_EQ(accelerator->position().step, says_so ? 2 : 1);
      // The means of 1, 2, 3 and of 4, 5.
      EXPECT_NEAR(WeightOf(*line), says_so ? 1 - 2 - 4.5 : 1 - 2, 1e-5);
      return accelerator->SaveAndEnd();
    });
  };
  const absl::Status incomplete = train(false);
  EXPECT_TRUE(StrContains(incomplete.message(), "amid a step")) << incomplete;
  EXPECT_TRUE(StrContains(incomplete.message(), "Accumulate(true)")) << incomplete;
  const absl::Status complete = train(true);
  EXPECT_TRUE(complete.ok()) << complete;
  EXPECT_TRUE(std::filesystem::exists(folder_ + "/step_2.pt"));
}

TEST_F(OwnLoopTest, RanksWithOtherOptimizersAreAnErrorThatNamesThem) {
  const auto refused = [&](const TrainerOptions& options, const std::vector<double>& rates) {
    const absl::Status status = OnRanks(2, [&](const session::Session& session) -> absl::Status {
      TrainerOptions own = options;
      if (rates.empty()) {
        own.lr_lambda = [&session](double, int64_t) { return session.is_main() ? 1 : 0.5; };
      }
      DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "pair", own));
      DDP_ASSIGN_OR_RETURN(auto model, accelerator->Prepare(Ones()));
      DDP_ASSIGN_OR_RETURN(auto other, accelerator->Prepare(Ones(), "other"));
      DDP_RETURN_IF_ERROR(accelerator->PrepareOptimizer(model).status());
      const OptimizerOptions sgd = {.name = "sgd",
                                    .lr = rates.empty() ? 0.1 : rates[session.rank()]};
      return accelerator->PrepareOptimizer(other, sgd).status();
    });
    return std::string(status.message());
  };
  for (const int64_t stage : {0, 1}) {
    options_.zero.stage = stage;
    EXPECT_EQ(refused(options_, {0.1, 0.1}), "");
    const std::string rates = refused(options_, {0.1, 0.2});
    EXPECT_TRUE(StrContains(rates,
                            "other.optimizer.lr=0.1 is not the same on all ranks: rank 0 "
                            "has 0.1, rank 1 has 0.2"))
        << rates;
    const std::string factors = refused(options_, {});
    EXPECT_TRUE(StrContains(factors, "schedule.factors=1, 1, 1, 1, 1 is not the same")) << factors;
  }
}

TEST_F(OwnLoopTest, AStateThatIsNotKnownIsRefusedWhereItIsSaved) {
  options_.make_optimizer = &MakePlain;
  const auto train = [&](int64_t steps_before) {
    return OnRanks(2, [&](const session::Session& session) -> absl::Status {
      DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "line", options_));
      const auto line = Ones();
      DDP_ASSIGN_OR_RETURN(auto model, accelerator->Prepare(line));
      DDP_ASSIGN_OR_RETURN(AcceleratedOptimizer * optimizer, accelerator->PrepareOptimizer(model));
      if (!options_.checkpoint.manager.directory.empty()) {
        DDP_RETURN_IF_ERROR(accelerator->LoadState());
      }
      EXPECT_EQ(accelerator->position().step, steps_before);
      {
        const auto scope = accelerator->Accumulate();
        optimizer->backward(Mean(model->forward(at::ones({1, 2})).sum(), 1));
        optimizer->step();
        optimizer->zero_grad();
        DDP_RETURN_IF_ERROR(accelerator->GoOn().status());
      }
      return accelerator->SaveAndEnd();
    });
  };
  EXPECT_EQ(train(0), absl::OkStatus());
  options_.checkpoint.manager.directory = folder_;
  const absl::Status refused = train(0);
  EXPECT_TRUE(StrContains(refused.message(),
                          "the optimizer of make_optimizer does not go with checkpoints that have "
                          "its state (checkpoint.save_optimizer)"))
      << refused;
  options_.checkpoint.save.save_optimizer = false;
  for (const int64_t steps_before : {0, 1}) EXPECT_EQ(train(steps_before), absl::OkStatus());
}

TEST_F(OwnLoopTest, TheEndAmidAStepSaysWhatIsLost) {
  options_.accumulate = 3;
  // What rank 0 prints when a loop ends after so many batches.
  const auto printed = [&](int batches, bool prepared, bool says_so) {
    testing::internal::CaptureStderr();
    const absl::Status done = OnRanks(2, [&](const session::Session& session) -> absl::Status {
      DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "line", options_));
      const auto line = Ones();
      DDP_ASSIGN_OR_RETURN(auto model, accelerator->Prepare(line));
      AcceleratedOptimizer* optimizer = nullptr;
      if (prepared) {
        DDP_ASSIGN_OR_RETURN(optimizer, accelerator->PrepareOptimizer(model));
      }
      for (int batch = 1; batch <= batches; ++batch) {
        const auto scope = accelerator->Accumulate(/*is_last=*/says_so && batch == batches);
        const at::Tensor sum = model->forward(at::ones({1, 2})).sum();
        if (!prepared) {
          sum.backward();
          continue;
        }
        optimizer->backward(Mean(sum, 1));
        optimizer->step();
        optimizer->zero_grad();
      }
      return accelerator->End();
    });
    EXPECT_TRUE(done.ok()) << done;
    return testing::internal::GetCapturedStderr();
  };
  for (const bool prepared : {true, false}) {
    const std::string lost = printed(5, prepared, false);
    const size_t at = lost.find("End amid a step: the gradients of 2 batches are lost");
    EXPECT_NE(at, std::string::npos) << lost;
    EXPECT_EQ(lost.find("End amid", at + 1), std::string::npos) << lost;
    EXPECT_FALSE(StrContains(printed(5, prepared, true), "End amid"));
    EXPECT_FALSE(StrContains(printed(6, prepared, false), "End amid"));
  }
  EXPECT_TRUE(StrContains(printed(4, true, false), "the gradients of 1 batch are lost"));
}

TEST_F(OwnLoopTest, LogsAreOfTheStepThatHasBegunLast) {
  options_.accumulate = 2;
  options_.log.dir = folder_;
  const absl::Status done = OnRanks(2, [&](const session::Session& session) -> absl::Status {
    DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "line", options_));
    DDP_ASSIGN_OR_RETURN(auto model, accelerator->Prepare(Ones()));
    DDP_ASSIGN_OR_RETURN(AcceleratedOptimizer * optimizer, accelerator->PrepareOptimizer(model));
    const auto log = [&](const std::string& where) {
      const absl::Status logged = accelerator->Log({{where, 1}});
      EXPECT_TRUE(logged.ok()) << logged;
    };
    const auto take = [&](const std::string& batch, bool is_last) -> absl::Status {
      {
        const auto scope = accelerator->Accumulate(is_last);
        log(batch + "/begin");
        optimizer->backward(Mean(model->forward(at::ones({1, 2})).sum(), 1));
        optimizer->step();
        optimizer->zero_grad();
        log(batch + "/after_step");
        DDP_RETURN_IF_ERROR(accelerator->GoOn().status());
        log(batch + "/after_go_on");
      }
      log(batch + "/after_scope");
      return absl::OkStatus();
    };
    log("before");
    DDP_RETURN_IF_ERROR(take("first", false));
    DDP_RETURN_IF_ERROR(take("second", false));
    DDP_RETURN_IF_ERROR(take("third", true));
    return accelerator->End();
  });
  ASSERT_TRUE(done.ok()) << done;
  const auto step_of = [&](const std::string& tag) {
    const auto values = Logged(folder_, tag);
    return values.size() == 1 ? values.begin()->first : -1;
  };
  EXPECT_EQ(step_of("before"), 0);
  for (const char* where : {"/begin", "/after_step", "/after_go_on", "/after_scope"}) {
    EXPECT_EQ(step_of(std::string("first") + where), 1) << where;
    EXPECT_EQ(step_of(std::string("second") + where), 1) << where;
    EXPECT_EQ(step_of(std::string("third") + where), 2) << where;
  }
}

// By the wrapper, whose forward would give all ranks rank 0's buffers, and with a loader that is
// there before the training.
TEST_F(OwnLoopTest, ARankWithoutABatchEvaluatesWithTheOthers) {
  options_.optimizer.lr = 0.01;
  at::Tensor means[2][3];
  const absl::Status done = OnRanks(3, [&](const session::Session& session) -> absl::Status {
    DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "net", options_));
    const auto net = std::make_shared<Net>(0);
    DDP_ASSIGN_OR_RETURN(auto model, accelerator->Prepare(net));
    DDP_ASSIGN_OR_RETURN(AcceleratedOptimizer * optimizer, accelerator->PrepareOptimizer(model));
    const Halves test(2);
    DDP_ASSIGN_OR_RETURN(auto tests, accelerator->EvaluationLoader<data::Batch>(test));
    const at::Tensor x = at::arange(8, at::kFloat).view({4, 2}) * (session.rank() + 1);
    for (auto& of_round : means) {
      net->train();
      {
        const auto scope = accelerator->Accumulate();
        optimizer->backward(Mean(model->forward(x).square().mean(), 4));
        optimizer->step();
        optimizer->zero_grad();
      }
      net->eval();
      const at::NoGradGuard no_grad;
      std::vector<std::pair<std::vector<int64_t>, at::Tensor>> outputs;
      while (true) {
        DDP_ASSIGN_OR_RETURN(const std::optional<data::Batch> batch, tests->Next());
        if (!batch) break;
        outputs.emplace_back(tests->indices(), model->forward(batch->input));
      }
      EXPECT_EQ(outputs.size(), session.rank() < 2 ? 1U : 0U);
      DDP_ASSIGN_OR_RETURN(const at::Tensor all, accelerator->GatherForMetrics(std::move(outputs)));
      EXPECT_EQ(all.size(0), 2);
      of_round[session.rank()] = net->norm->running_mean.clone();
    }
    return accelerator->End();
  });
  ASSERT_TRUE(done.ok()) << done;
  for (const auto& of_round : means) {
    for (int rank = 1; rank < 3; ++rank) {
      EXPECT_TRUE(at::equal(of_round[rank], of_round[0])) << of_round[rank] << of_round[0];
    }
  }
}

// A disk without room, until it has some.
struct Full : FileSystem {
  int Statvfs(const char* path, struct statvfs* info) override {
    if (!is_full) return FileSystem::Statvfs(path, info);
    *info = {};
    info->f_blocks = info->f_bavail = info->f_frsize = 1;
    return 0;
  }
  std::atomic<bool> is_full = true;
};

// Without another save, which would find it.
TEST_F(OwnLoopTest, ASaveThatFailsEndsTheLoopOnAllRanks) {
  Full full;
  options_.checkpoint.manager.directory = folder_;
  options_.checkpoint.async = true;
  int64_t steps[2] = {};
  const absl::Status done = OnRanks(2, [&](const session::Session& session) -> absl::Status {
    TrainerOptions options = options_;
    if (session.is_main()) options.checkpoint.manager.files = &full;
    DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "line", options));
    DDP_ASSIGN_OR_RETURN(auto model, accelerator->Prepare(Ones()));
    DDP_ASSIGN_OR_RETURN(AcceleratedOptimizer * optimizer, accelerator->PrepareOptimizer(model));
    DDP_RETURN_IF_ERROR(accelerator->SaveState());
    for (;;) {
      DDP_ASSIGN_OR_RETURN(const bool more, accelerator->GoOn());
      if (!more || accelerator->position().step == 10000) break;
      const auto scope = accelerator->Accumulate();
      optimizer->backward(Mean(model->forward(at::ones({1, 2})).sum(), 1));
      optimizer->step();
      optimizer->zero_grad();
      absl::SleepFor(absl::Milliseconds(1));
    }
    steps[session.rank()] = accelerator->position().step;
    return accelerator->End();
  });
  EXPECT_EQ(done.code(), absl::StatusCode::kResourceExhausted) << done;
  EXPECT_TRUE(StrContains(done.message(), "disk full")) << done;
  EXPECT_EQ(steps[0], steps[1]);
  EXPECT_LT(steps[0], 10000);
}

// As where a long set-up hangs. The first signal waits for GoOn.
TEST_F(OwnLoopTest, AFurtherSignalEndsTheSetUpAtOnce) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto set_up = [&] {
    RunRanks(1, [&](const session::Session& session) {
      const auto accelerator = Accelerator::Create(session, "line", options_);
      raise(SIGTERM);
      absl::SleepFor(absl::Milliseconds(1100));
      raise(SIGTERM);
    });
    std::exit(0);
  };
  EXPECT_EXIT(set_up(), testing::KilledBySignal(SIGTERM), "");
}

// The signal comes once rank 1 has its first batch.
TEST_F(OwnLoopTest, AnEvaluationIsLeftForASignalAndMadeByTheNextRun) {
  options_.checkpoint.manager.directory = folder_;
  options_.batch_size = options_.eval_batch_size = 1;
  const Halves data(2), test(8);
  bool stops = true;
  int evaluated[2] = {};  // batches
  RunEnd ends[2];
  const auto train = [&](const session::Session& session) -> absl::Status {
    DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "line", options_));
    DDP_ASSIGN_OR_RETURN(auto loader, accelerator->PrepareLoader<data::Batch>(data));
    DDP_ASSIGN_OR_RETURN(auto model, accelerator->Prepare(Ones()));
    DDP_RETURN_IF_ERROR(accelerator->LoadState());
    const auto evaluate_and_save = [&]() -> absl::Status {
      const at::NoGradGuard no_grad;
      std::vector<std::pair<std::vector<int64_t>, at::Tensor>> outputs;
      DDP_ASSIGN_OR_RETURN(auto tests, accelerator->EvaluationLoader<data::Batch>(test));
      while (true) {
        DDP_ASSIGN_OR_RETURN(const auto batch, tests->NextUnlessStopped());
        if (!batch) break;
        if (++evaluated[session.rank()] == 1 && stops && session.rank() == 1) raise(SIGUSR2);
        outputs.emplace_back(tests->indices(), model->forward(batch->input));
      }
      DDP_ASSIGN_OR_RETURN(const bool complete, tests->IsComplete());
      if (!complete) return accelerator->SaveAndEnd();
      DDP_ASSIGN_OR_RETURN(const auto all, accelerator->GatherForMetrics(std::move(outputs)));
      EXPECT_EQ(all.size(0), 8);
      return accelerator->SaveState();
    };
    while (accelerator->position().epoch < 1) {
      while (true) {
        DDP_ASSIGN_OR_RETURN(const auto batch, loader->Next());
        if (!batch) break;
        const auto scope = accelerator->Accumulate();
        DDP_ASSIGN_OR_RETURN(const bool more, accelerator->GoOn());
        EXPECT_TRUE(more);
      }
      const absl::Status done = evaluate_and_save();
      ends[session.rank()] = accelerator->end();
      if (!accelerator->end().early()) {
        DDP_RETURN_IF_ERROR(done);
        continue;
      }
      EXPECT_FALSE(done.ok());  // 128 + the signal
      DDP_ASSIGN_OR_RETURN(const bool more, accelerator->GoOn());
      EXPECT_FALSE(more);
      return absl::OkStatus();
    }
    return accelerator->End();
  };
  absl::Status done = OnRanks(2, train);
  ASSERT_TRUE(done.ok()) << done;
  EXPECT_EQ(evaluated[1], 1);
  for (const RunEnd& end : ends) {
    EXPECT_EQ(end.Name(), "signal USR2");
    EXPECT_EQ(std::filesystem::path(end.saved).filename(), "epoch_0_step_1.pt");
  }

  stops = false;
  evaluated[0] = evaluated[1] = 0;
  done = OnRanks(2, train);
  ASSERT_TRUE(done.ok()) << done;
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(evaluated[rank], 4) << rank;
    EXPECT_EQ(ends[rank].Name(), "end") << rank;
  }
  EXPECT_TRUE(std::filesystem::exists(folder_ + "/epoch_1.pt"));
}

// A run that goes on from the epoch's end makes no evaluation of it.
TEST_F(OwnLoopTest, AnEvaluationThatIsLeftIsBeforeTheEndOfAnEpochThatWasNotSaved) {
  options_.checkpoint.manager.directory = folder_;
  options_.checkpoint.manager.on_save_error = "continue";
  options_.batch_size = options_.eval_batch_size = 1;
  const Halves data(2), test(8);
  for (const bool async : {false, true}) {
    for (const bool fails : {true, false}) {
      SCOPED_TRACE(absl::StrCat("async ", async, ", fails ", fails));
      std::filesystem::remove_all(folder_);
      options_.checkpoint.async = async;
      Full full;
      full.is_full = fails;
      RunEnd ends[2];
      const absl::Status done = OnRanks(2, [&](const session::Session& session) -> absl::Status {
        TrainerOptions options = options_;
        if (session.is_main()) options.checkpoint.manager.files = &full;
        DDP_ASSIGN_OR_RETURN(auto accelerator, Accelerator::Create(session, "line", options));
        DDP_ASSIGN_OR_RETURN(auto loader, accelerator->PrepareLoader<data::Batch>(data));
        DDP_ASSIGN_OR_RETURN(auto model, accelerator->Prepare(Ones()));
        while (true) {
          DDP_ASSIGN_OR_RETURN(const auto batch, loader->Next());
          if (!batch) break;
          const auto scope = accelerator->Accumulate();
        }
        DDP_RETURN_IF_ERROR(accelerator->SaveState());
        DDP_ASSIGN_OR_RETURN(auto tests, accelerator->EvaluationLoader<data::Batch>(test));
        for (bool is_first = true;; is_first = false) {
          DDP_ASSIGN_OR_RETURN(const auto batch, tests->NextUnlessStopped());
          if (!batch) break;
          if (!is_first || session.rank() != 1) continue;
          accelerator->RequestStop("enough");  // which alone lets the evaluation end
          raise(SIGUSR2);
        }
        DDP_ASSIGN_OR_RETURN(const bool complete, tests->IsComplete());
        EXPECT_FALSE(complete);
        full.is_full = false;
        EXPECT_EQ(ExitCodeIn(accelerator->SaveAndEnd()), 128 + SIGUSR2);
        ends[session.rank()] = accelerator->end();
        return absl::OkStatus();
      });
      ASSERT_TRUE(done.ok()) << done;
      for (const RunEnd& end : ends) {
        EXPECT_EQ(end.Name(), "signal USR2");
        EXPECT_EQ(std::filesystem::path(end.saved).filename(),
                  fails ? "epoch_0_step_1.pt" : "epoch_1.pt");
      }
      EXPECT_EQ(std::filesystem::exists(folder_ + "/epoch_1.pt"), !fails);
    }
  }
}

}  // namespace
}  // namespace ddp::trainer
