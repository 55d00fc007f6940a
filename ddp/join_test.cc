#include "ddp/join.h"

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "c10/util/Exception.h"
#include "ddp/all_gather.h"
#include "ddp/collective_status.h"
#include "ddp/nets_testing.h"
#include "ddp/reducer.h"
#include "ddp/sync_batch_norm.h"
#include "gtest/gtest.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/embedding.h"
#include "torch/optim/sgd.h"

namespace ddp {
namespace {

// The numbers of batches of ranks 0, 1 and 2.
const std::vector<int> kBatches = {5, 2, 0};

// What the ranks that have inputs in this step average to.
std::vector<at::Tensor> ExpectedInStep(int step, bool of_all_ranks, bool use_skipped) {
  int live = 0;
  for (const int batches : kBatches) live += step < batches;
  const double factor = of_all_ranks ? 1.0 : 3.0 / live;
  return MeanGradients<Net>(3, [&](Net& net, int rank) {
    const at::Tensor loss = net.forward(Input(rank, step), use_skipped).pow(2).sum();
    return loss * (step < kBatches[rank] ? factor : 0.0);
  });
}

void ExpectEqualOnAllRanks(const torch::nn::Module& module, const GroupPtr& group) {
  std::vector<at::Tensor> tensors = module.parameters();
  for (const at::Tensor& buffer : module.buffers()) tensors.push_back(buffer);
  for (const at::Tensor& tensor : tensors) {
    for (const at::Tensor& other : AllGather(*group, tensor.detach())) {
      EXPECT_TRUE(at::equal(other, tensor.detach()));
    }
  }
}

TEST(JoinTest, RanksWithFiveTwoAndNoBatchesAverageTheirGradients) {
  const std::vector<DataParallelOptions> wrappers = {
      {},
      {.bucket_cap_mb = 1e-4},
      {.bucket_cap_mb = 1e-4, .gradient_as_bucket_view = true},
      {.find_unused_parameters = true},
      {.static_graph = true},
  };
  for (size_t w = 0; w < wrappers.size(); ++w) {
    for (const bool of_all_ranks : {true, false}) {
      RunRanks(3, [&](int rank, const GroupPtr& group) {
        auto model = *Wrap(SeededNet(), group, wrappers[w]);
        const JoinOptions options = {.divide_by_initial_world_size = of_all_ranks};
        const absl::Status joined = Join({&model->parallel()}, options, [&] {
          for (int step = 0; step < kBatches[rank]; ++step) {
            SCOPED_TRACE(absl::StrCat("wrapper ", w, " rank ", rank, " step ", step));
            model->zero_grad();
            model->forward(Input(rank, step), true).pow(2).sum().backward();
            ExpectClose(Gradients(*model->module()), ExpectedInStep(step, of_all_ranks, true));
          }
          return absl::OkStatus();
        });
        EXPECT_TRUE(joined.ok()) << joined;
        // The wrapper goes on as before.
        model->zero_grad();
        model->forward(Input(rank, 7), true).pow(2).sum().backward();
        ExpectClose(Gradients(*model->module()), ExpectedGradients(3, 7));
      });
    }
  }
}

TEST(JoinTest, AParameterThatNoLiveRankUsesKeepsItsGradient) {
  RunRanks(3, [&](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group, {.find_unused_parameters = true});
    const absl::Status joined = Join({&model->parallel()}, {}, [&] {
      for (int step = 0; step < kBatches[rank]; ++step) {
        model->zero_grad();
        model->forward(Input(rank, step), false).pow(2).sum().backward();
        EXPECT_FALSE(model->module()->skipped->weight.grad().defined()) << "step " << step;
        ExpectClose(Gradients(*model->module()), ExpectedInStep(step, true, false));
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(joined.ok()) << joined;
  });
}

// A rank without batches makes its first backward as a shadow, and learns from it what the others
// use.
TEST(JoinTest, AStaticGraphIsTheOthersOnARankWithoutBatches) {
  for (const bool views : {false, true}) {
    RunRanks(3, [&](int rank, const GroupPtr& group) {
      auto net = SeededNet();
      auto model = *Wrap(net, group, {.gradient_as_bucket_view = views, .static_graph = true});
      const at::Tensor unused = net->skipped->weight.detach().clone();
      // What moves a parameter whose gradient is zeros.
      torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).weight_decay(0.1));
      // No rank uses `skipped`.
      const auto train = [&](int step) {
        model->zero_grad();
        model->forward(Input(rank, step), false).pow(2).sum().backward();
        EXPECT_FALSE(net->skipped->weight.grad().defined()) << "step " << step;
        sgd.step();
      };
      const absl::Status joined = Join({&model->parallel()}, {}, [&] {
        for (int step = 0; step < kBatches[rank]; ++step) train(step);
        return absl::OkStatus();
      });
      EXPECT_TRUE(joined.ok()) << joined;
      EXPECT_TRUE(at::equal(net->skipped->weight, unused));
      // Now all ranks have batches.
      for (int step = 5; step < 8; ++step) train(step);
      EXPECT_TRUE(at::equal(net->skipped->weight, unused));
      ExpectEqualOnAllRanks(*net, group);
    });
  }
}

TEST(JoinTest, InTheEndAllRanksHaveTheModelOfTheLast) {
  // A rate at which the loss falls: where it grows, so do differences of rounding.
  const auto options = torch::optim::SGDOptions(0.01).momentum(0.9);
  // One process that sees what the ranks see.
  const std::shared_ptr<Net> alone = SeededNet();
  torch::optim::SGD sgd(alone->parameters(), options);
  const std::vector<int> batches = {1, 4, 2};
  for (int step = 0; step < 4; ++step) {
    alone->zero_grad();
    for (int rank = 0; rank < 3; ++rank) {
      if (step >= batches[rank]) continue;
      (alone->forward(Input(rank, step), true).pow(2).sum() / 3).backward();
    }
    sgd.step();
  }
  RunRanks(3, [&](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group);
    torch::optim::SGD mine(model->module()->parameters(), options);
    const absl::Status joined = Join({&model->parallel()}, {}, [&] {
      for (int step = 0; step < batches[rank]; ++step) {
        model->zero_grad();
        model->forward(Input(rank, step), true).pow(2).sum().backward();
        mine.step();
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(joined.ok()) << joined;
    ExpectEqualOnAllRanks(*model->module(), group);
    ExpectClose(model->module()->parameters(), alone->parameters());
  });
}

TEST(JoinTest, GradientsOfNoSyncAreReducedAlsoIfTheirRankRunsOut) {
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group);
    // Two batches per reduction; the other ranks lack the last batch.
    const int batches = rank == 0 ? 4 : 3;
    std::vector<at::Tensor> last;
    const absl::Status joined = Join({&model->parallel()}, {}, [&] {
      for (int step = 0; step < batches; ++step) {
        if (step % 2 == 0) model->zero_grad();
        std::optional<DistributedDataParallel<Net>::NoSync> no_sync;
        if (step % 2 == 0) no_sync.emplace(model->parallel());
        model->forward(Input(rank, step), true).pow(2).sum().backward();
      }
      if (rank == 0) last = Gradients(*model->module());
      return absl::OkStatus();
    });
    EXPECT_TRUE(joined.ok()) << joined;
    if (rank != 0) return;
    ExpectClose(last, MeanGradients<Net>(WorldSize(), [](Net& net, int of) {
                  const at::Tensor loss = net.forward(Input(of, 2), true).pow(2).sum();
                  return of == 0 ? loss + net.forward(Input(of, 3), true).pow(2).sum() : loss;
                }));
  });
}

struct Weight : torch::nn::Module {
  at::Tensor forward(const at::Tensor& factor) { return (weight * factor).sum(); }
  at::Tensor weight{register_parameter("weight", at::ones({7}))};
};

// Rank 1 has no inputs, so that gradients are half of rank 0's.
TEST(JoinTest, ResetsAndForwardsAtAnyPlace) {
  using Model = DistributedDataParallel<Weight>;
  const auto forward = [](Model& model, double factor) {
    return model.forward(at::full({7}, factor));
  };
  const std::vector<std::pair<std::function<void(Model&)>, double>> loops = {
      {[&](Model& model) {
         for (int step = 0; step < 2; ++step) {
           const at::Tensor loss = forward(model, 8);
           model.zero_grad();
           loss.backward();
         }
       },
       4},
      {[&](Model& model) {
         forward(model, 8);
         (forward(model, 2) + forward(model, 4)).backward();
         const at::NoGradGuard no_grad;
         forward(model, 8);
       },
       3},
      {[&](Model& model) {
         forward(model, 8).backward();
         forward(model, 2).backward();
       },
       5},
      {[&](Model& model) {
         for (const bool set_to_none : {true, false}) {
           forward(model, 8).backward();
           model.module()->zero_grad(set_to_none);
         }
         {
           const auto no_sync = model.no_sync();
           forward(model, 2).backward();
         }
         forward(model, 4).backward();
       },
       3},
      {[&](Model& model) {
         const at::Tensor first = forward(model, 8), second = forward(model, 2);
         first.backward();
         second.backward();
       },
       5},
  };
  const std::vector<DataParallelOptions> wrappers = {{},
                                                     {.find_unused_parameters = true},
                                                     {.gradient_as_bucket_view = true},
                                                     {.static_graph = true}};
  for (size_t w = 0; w < wrappers.size(); ++w) {
    for (size_t i = 0; i < loops.size(); ++i) {
      for (const bool of_all_ranks : {true, false}) {
        SCOPED_TRACE(absl::StrCat("wrapper ", w, ", loop ", i, ", of all ranks: ", of_all_ranks));
        const double expected = loops[i].second * (of_all_ranks ? 1 : 2);
        RunRanks(2, [&](int rank, const GroupPtr& group) {
          auto model = *Wrap(std::make_shared<Weight>(), group, wrappers[w]);
          const JoinOptions options = {.divide_by_initial_world_size = of_all_ranks};
          const absl::Status joined = Join({&model->parallel()}, options, [&] {
            if (rank == 0) loops[i].first(*model);
            return absl::OkStatus();
          });
          EXPECT_TRUE(joined.ok()) << joined;
          const at::Tensor gradient = model->module()->weight.grad();
          EXPECT_TRUE(at::equal(gradient, at::full({7}, expected))) << gradient;
        });
      }
    }
  }
}

// The caller's first register_hook of a parameter.
TEST(JoinTest, ACallersHookOnAParameter) {
  RunRanks(2, [&](int rank, const GroupPtr& group) {
    auto model = *Wrap(std::make_shared<Weight>(), group);
    const absl::Status joined = Join({&model->parallel()}, {}, [&] {
      if (rank != 0) return absl::OkStatus();
      model->forward(at::full({7}, 8)).backward();
      model->module()->weight.register_hook(
          [](const at::Tensor& gradient) { return gradient * 2; });
      model->forward(at::full({7}, 2)).backward();
      return absl::OkStatus();
    });
    EXPECT_TRUE(joined.ok()) << joined;
    EXPECT_TRUE(at::equal(model->module()->weight.grad(), at::full({7}, 4 + 2)));
  });
}

// As of two optimizers.
struct TwoWeights : torch::nn::Module {
  at::Tensor forward(double factor) { return ((a + b) * factor).sum(); }
  at::Tensor a{register_parameter("a", at::ones({1}))};
  at::Tensor b{register_parameter("b", at::ones({1}))};
};

// Rank 1 has no inputs.
TEST(JoinTest, AResetOfSomeGradientsIsTheShadowsToo) {
  const std::vector<DataParallelOptions> wrappers = {{},
                                                     {.find_unused_parameters = true},
                                                     {.gradient_as_bucket_view = true},
                                                     {.static_graph = true}};
  for (size_t w = 0; w < wrappers.size(); ++w) {
    for (const bool to_none : {true, false}) {
      SCOPED_TRACE(absl::StrCat("wrapper ", w, ", to none: ", to_none));
      RunRanks(2, [&](int rank, const GroupPtr& group) {
        const auto net = std::make_shared<TwoWeights>();
        auto model = *Wrap(net, group, wrappers[w]);
        const absl::Status joined = Join({&model->parallel()}, {}, [&] {
          if (rank != 0) return absl::OkStatus();
          model->forward(8).backward();
          if (to_none) {
            net->a.mutable_grad().reset();
          } else {
            net->a.mutable_grad().zero_();
          }
          model->forward(2).backward();
          return absl::OkStatus();
        });
        EXPECT_TRUE(joined.ok()) << joined;
        EXPECT_EQ(net->a.grad().item<float>(), 1);
        EXPECT_EQ(net->b.grad().item<float>(), 5);
      });
    }
  }
}

// Rank 1 has no inputs. Divided by one rank or by both.
TEST(JoinTest, AGradientThatTheLastBackwardDoesNotReachIsKept) {
  for (const bool views : {false, true}) {
    for (const bool of_all_ranks : {true, false}) {
      SCOPED_TRACE(absl::StrCat("views: ", views, ", of all ranks: ", of_all_ranks));
      RunRanks(2, [&](int rank, const GroupPtr& group) {
        const auto net = std::make_shared<TwoWeights>();
        auto model =
            *Wrap(net, group, {.find_unused_parameters = true, .gradient_as_bucket_view = views});
        const JoinOptions options = {.divide_by_initial_world_size = of_all_ranks};
        const absl::Status joined = Join({&model->parallel()}, options, [&] {
          if (rank != 0) return absl::OkStatus();
          model->forward(8).backward();
          model->parallel().PreForward();
          const at::Tensor of_a = (net->a * 2).sum();
          model->parallel().PostForward({of_a});
          of_a.backward();
          return absl::OkStatus();
        });
        EXPECT_TRUE(joined.ok()) << joined;
        const double ranks = of_all_ranks ? 2 : 1;
        EXPECT_EQ(net->a.grad().item<float>(), (8 + 2) / ranks);
        EXPECT_EQ(net->b.grad().item<float>(), 8 / ranks);
      });
    }
  }
}

// A rank runs out with gradients of no_sync() on top of others. Where the sum is divided by the
// ranks with inputs, it cannot tell which part the others have already.
TEST(JoinTest, GradientsOfNoSyncOnTopOfReducedOnes) {
  for (const bool of_all_ranks : {true, false}) {
    for (const bool reset : {true, false}) {
      SCOPED_TRACE(absl::StrCat("of all ranks: ", of_all_ranks, ", reset: ", reset));
      RunRanks(2, [&](int rank, const GroupPtr& group) {
        auto model = *Wrap(std::make_shared<Weight>(), group);
        const JoinOptions options = {.divide_by_initial_world_size = of_all_ranks};
        const absl::Status joined = Join({&model->parallel()}, options, [&] {
          model->forward(at::full({7}, 8.0f)).backward();
          if (reset) model->zero_grad();
          {
            const auto no_sync = model->no_sync();
            model->forward(at::full({7}, 2.0f)).backward();
          }
          if (rank == 0) model->forward(at::full({7}, 4.0f)).backward();
          return absl::OkStatus();
        });
        if (of_all_ranks || reset) {
          EXPECT_TRUE(joined.ok()) << joined;
          const double sum = 2 + 2 + 4, expected = (reset ? 0 : 8) + sum / (of_all_ranks ? 2 : 1);
          EXPECT_TRUE(at::equal(model->module()->weight.grad(),
                                at::full({7}, static_cast<float>(expected))))
              << model->module()->weight.grad();
        } else {
          EXPECT_TRUE(absl::StrContains(joined.ToString(), "on top of")) << joined;
        }
      });
    }
  }
}

struct ComplexWeight : torch::nn::Module {
  at::Tensor forward(double factor) { return at::view_as_real(weight * factor).sum(); }
  at::Tensor weight{register_parameter("weight", at::ones({3}, at::kComplexFloat))};
};

// Backward can start from a real number only, also on rank 1, which has no inputs.
TEST(JoinTest, AComplexParameter) {
  for (const DataParallelOptions& options :
       {DataParallelOptions{}, {.find_unused_parameters = true}, {.static_graph = true}}) {
    RunRanks(2, [&](int rank, const GroupPtr& group) {
      auto model = *Wrap(std::make_shared<ComplexWeight>(), group, options);
      const absl::Status joined = Join({&model->parallel()}, {}, [&] {
        if (rank == 0) model->forward(2).backward();
        return absl::OkStatus();
      });
      EXPECT_TRUE(joined.ok()) << joined;
      const at::Tensor expected = at::full({3}, c10::complex<float>(1, 1), at::kComplexFloat);
      EXPECT_TRUE(at::equal(model->module()->weight.grad(), expected));
    });
  }
}

// Its optimizer's state is behind.
TEST(JoinTest, TheJoinAfterOneInWhichARankRanOutWarnsOnce) {
  for (const bool uneven : {true, false}) {
    bool has_rank_zero = false;  // over mpi each rank is a process
    testing::internal::CaptureStderr();
    RunRanks(2, [&](int rank, const GroupPtr& group) {
      if (rank == 0) has_rank_zero = true;
      auto model = *Wrap(SeededNet(), group);
      for (int epoch = 0; epoch < 3; ++epoch) {
        const absl::Status joined = Join({&model->parallel()}, {}, [&] {
          for (int step = uneven ? rank : 0; step < 2; ++step) {
            model->zero_grad();
            model->forward(Input(rank, step), true).sum().backward();
          }
          return absl::OkStatus();
        });
        EXPECT_TRUE(joined.ok()) << joined;
      }
    });
    const std::string printed = testing::internal::GetCapturedStderr();
    const std::vector<std::string> parts = absl::StrSplit(printed, "the ranks drift apart");
    EXPECT_EQ(parts.size(), uneven && has_rank_zero ? 2 : 1) << printed;
  }
}

// Counts its forwards in a buffer.
struct Counter : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    count.add_(1);
    return x * weight;
  }
  at::Tensor weight{register_parameter("weight", at::ones({1}))};
  at::Tensor count{register_buffer("count", at::zeros({1}))};
};

TEST(JoinTest, BuffersAreThoseOfARankWithInputs) {
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    auto model = *Wrap(std::make_shared<Counter>(), group);
    const int batches = rank == 1 ? 3 : 1;
    const absl::Status joined = Join({&model->parallel()}, {}, [&] {
      for (int step = 0; step < batches; ++step) model->forward(at::ones({1})).sum().backward();
      return absl::OkStatus();
    });
    EXPECT_TRUE(joined.ok()) << joined;
    EXPECT_EQ(model->module()->count.item<float>(), 3);
  });
}

TEST(JoinTest, BuffersAreThoseOfTheLowestRankWithInputs) {
  const std::vector<int> batches = {1, 3, 3};
  RunRanks(3, [&](int rank, const GroupPtr& group) {
    auto model = *Wrap(std::make_shared<Counter>(), group);
    const absl::Status joined = Join({&model->parallel()}, {}, [&] {
      for (int step = 0; step < batches[rank]; ++step) {
        model->module()->count.fill_(10 * rank);
        model->forward(at::ones({1})).sum().backward();
        EXPECT_EQ(model->module()->count.item<float>(), step == 0 ? 1 : 11) << "step " << step;
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(joined.ok()) << joined;
  });
}

TEST(JoinTest, BuffersOfForwardsWithoutGradients) {
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    auto model = *Wrap(std::make_shared<Counter>(), group);
    const absl::Status joined = Join({&model->parallel()}, {}, [&] {
      const at::NoGradGuard no_grad;
      for (int step = 0; step < (rank == 1 ? 3 : 1); ++step) model->forward(at::ones({1}));
      return absl::OkStatus();
    });
    EXPECT_TRUE(joined.ok()) << joined;
    EXPECT_EQ(model->module()->count.item<float>(), 3);
  });
}

TEST(JoinTest, OfSeveralLastRanksTheLowestGivesTheModel) {
  const std::vector<int> batches = {1, 2, 2};
  RunRanks(3, [&](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group);
    at::Tensor bias = model->module()->second->bias;
    const absl::Status joined = Join({&model->parallel()}, {}, [&] {
      for (int step = 0; step < batches[rank]; ++step) {
        model->forward(Input(rank, step), true).pow(2).sum().backward();
      }
      const at::NoGradGuard no_grad;
      bias.fill_(rank);
      return absl::OkStatus();
    });
    EXPECT_TRUE(joined.ok()) << joined;
    EXPECT_TRUE(bias.eq(1).all().item<bool>()) << bias;
  });
}

struct Words : torch::nn::Module {
  at::Tensor forward(const at::Tensor& words) { return table->forward(words).sum(); }
  torch::nn::Embedding table{register_module(
      "table", torch::nn::Embedding(torch::nn::EmbeddingOptions(7, 3).sparse(true)))};
};

TEST(JoinTest, SparseGradients) {
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet<Words>(), group);
    const absl::Status joined = Join({&model->parallel()}, {}, [&] {
      for (int step = 0; step < (rank == 0 ? 3 : 1); ++step) {
        model->zero_grad();
        model->forward(at::tensor({step, 3})).backward();
        const at::Tensor gradient = model->module()->table->weight.grad().to_dense();
        const float each = step == 0 ? 1 : 1.0f / WorldSize();
        EXPECT_FLOAT_EQ(gradient[3][0].item<float>(), each) << "step " << step;
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(joined.ok()) << joined;
  });
}

TEST(JoinTest, ThrowOnEarlyTerminationIsAnErrorOnAllRanksThatNamesWhoRanOut) {
  RunRanks(3, [&](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group);
    int steps = 0;
    const absl::Status joined =
        Join({&model->parallel()}, {.throw_on_early_termination = true}, [&] {
          for (; steps < (rank == 1 ? 2 : 4); ++steps) {
            model->forward(Input(rank, steps), true).pow(2).sum().backward();
          }
          return absl::OkStatus();
        });
    EXPECT_EQ(joined.code(), absl::StatusCode::kFailedPrecondition) << joined;
    EXPECT_TRUE(absl::StrContains(joined.message(), "rank 1")) << joined;
    EXPECT_EQ(steps, 2);
    // The group still works.
    EXPECT_EQ(AllGather(*group, at::full({1}, rank))[2].item<int>(), 2);
  });
}

struct Normalised : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return norm->forward(x); }
  torch::nn::BatchNorm1d norm{register_module("norm", torch::nn::BatchNorm1d(4))};
};

TEST(JoinTest, SyncBatchNormRequiresThrowOnEarlyTermination) {
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    auto module = std::make_shared<Normalised>();
    ASSERT_EQ(*ConvertSyncBatchNorm(*module, "torch", group), 1);
    auto model = *Wrap(module, group);
    EXPECT_EQ(model->parallel().GetDDPLoggingData().ints_map.at("has_sync_bn"), 1);
    const auto train = [&](const JoinOptions& options, int batches) {
      return Join({&model->parallel()}, options, [&] {
        for (int step = 0; step < batches; ++step) {
          model->forward(Input(rank, step) + at::arange(4)).sum().backward();
        }
        return absl::OkStatus();
      });
    };
    const absl::Status refused = train({}, 2);
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::StrContains(refused.message(), "SyncBatchNorm")) << refused;
    EXPECT_TRUE(absl::StrContains(refused.message(), "throw_on_early_termination")) << refused;
    EXPECT_TRUE(train({.throw_on_early_termination = true}, 2).ok());
    const absl::Status uneven = train({.throw_on_early_termination = true}, 2 + rank);
    EXPECT_EQ(uneven.code(), absl::StatusCode::kFailedPrecondition) << uneven;
  });
}

TEST(JoinTest, RanksThatDoDifferentThingsSaySo) {
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group);
    const absl::Status joined = Join({&model->parallel()}, {}, [&] {
      if (rank == 0) {
        model->parallel().SyncBuffers();
      } else {
        model->forward(Input(rank, 0), true);
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(absl::StrContains(joined.message(), "ranks must make the same calls")) << joined;
  });
}

// For those who must tell the failure of a rank from its echoes on others.
TEST(JoinTest, AFailedCollectiveIsMarkedInTheStatus) {
  RunRanks(2, [&](int, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group);
    const absl::Status echo = Join({&model->parallel()}, {}, []() -> absl::Status {
      C10_THROW_ERROR(DistBackendError, "the peer is gone");
    });
    EXPECT_TRUE(IsFromCollective(echo)) << echo;
    EXPECT_TRUE(IsFromCollective(Annotate(echo, "training")));
    const absl::Status own = Join({&model->parallel()}, {}, []() -> absl::Status {
      throw std::runtime_error("the disk is full");
    });
    EXPECT_EQ(own.message(), "the disk is full");
    EXPECT_FALSE(IsFromCollective(own)) << own;
  });
}

TEST(JoinTest, WhatMakesNoSenseIsRefused) {
  EXPECT_EQ(Join({}, {}, [] { return absl::OkStatus(); }).code(),
            absl::StatusCode::kInvalidArgument);
  RunRanks(2, [&](int, const GroupPtr& group) {
    auto model = *Wrap(SeededNet(), group);
    auto alone = *Wrap(SeededNet(), nullptr);
    EXPECT_EQ(
        Join({&model->parallel(), &alone->parallel()}, {}, [] { return absl::OkStatus(); }).code(),
        absl::StatusCode::kInvalidArgument);
    const absl::Status nested = Join({&model->parallel()}, {}, [&] {
      return Join({&model->parallel()}, {}, [] { return absl::OkStatus(); });
    });
    EXPECT_EQ(nested.code(), absl::StatusCode::kFailedPrecondition) << nested;
    const absl::Status own =
        Join({&alone->parallel()}, {}, [] { return absl::NotFoundError("of body"); });
    EXPECT_EQ(own.code(), absl::StatusCode::kNotFound);
    static constexpr double kFactor = 1;
    auto hooked = *Wrap(SeededNet(), group);
    ASSERT_TRUE(hooked->register_comm_hook(std::make_unique<AverageHook>(group, &kFactor)).ok());
    const absl::Status divided =
        Join({&hooked->parallel()}, {.divide_by_initial_world_size = false},
             [] { return absl::OkStatus(); });
    EXPECT_EQ(divided.code(), absl::StatusCode::kInvalidArgument) << divided;
  });
}

}  // namespace
}  // namespace ddp
