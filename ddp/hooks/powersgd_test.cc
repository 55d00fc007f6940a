#include "ddp/hooks/powersgd.h"

#include <atomic>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "checkpoint/stateful.h"
#include "ddp/hooks/hooks_testing.h"
#include "torch/nn/modules/embedding.h"

namespace ddp::hooks {
namespace {

CommHookOptions PowerSgd(const PowerSgdOptions& own) {
  CommHookOptions options = {.name = "powersgd"};
  options.implementations.Mutable<PowerSgdOptions>("powersgd") = own;
  return options;
}

// Two matrices of different ranks, and three tensors that are not compressed: a vector, a small
// one, and one without dimensions.
const Shapes kShapes = {{20, 30}, {7}, {2, 2}, {}, {16, 4, 5}};

TEST(NextSeedTest, IsNumpysRandint) {
  std::mt19937 zero(0), seven(7);
  for (const uint64_t expected : {209652396, 398764591, 924231285, 404868288, 441365315}) {
    EXPECT_EQ(NextSeed(zero), expected);
  }
  for (const uint64_t expected : {327741615, 976413892, 128500249, 296233462, 809211459}) {
    EXPECT_EQ(NextSeed(seven), expected);
  }
}

TEST(ShapeForTest, CompressesWhatShrinksByMoreThanTheRate) {
  const PowerSgdOptions options = {.matrix_approximation_rank = 2};
  EXPECT_EQ(ShapeFor({20, 30}, options).sent(), (20 + 30) * 2);
  EXPECT_EQ(ShapeFor({16, 4, 5}, options).sent(), (16 + 20) * 2);
  EXPECT_EQ(ShapeFor({100}, options).sent(), 100);
  EXPECT_EQ(ShapeFor({}, options).rank, 0);
  EXPECT_EQ(ShapeFor({0, 5}, options).sent(), 0);
  EXPECT_EQ(ShapeFor({8, 8}, options).rank, 0);  // (8 + 8) 2 2 = 8 8
  EXPECT_EQ(ShapeFor({8, 9}, options).rank, 2);
  EXPECT_EQ(ShapeFor({8, 8}, {.min_compression_rate = 0.5}).rank, 1);
  EXPECT_EQ(ShapeFor({1, 9}, {.matrix_approximation_rank = 4, .min_compression_rate = 0.5}).rank,
            1);
}

TEST(OrthogonalizeTest, ColumnsBecomeOrthonormal) {
  for (const int64_t columns : {1, 2, 3, 8}) {
    at::Tensor matrix = at::randn({1, 20, columns}, at::detail::createCPUGenerator(columns));
    const at::Tensor before = matrix.clone();
    Orthogonalize(matrix, 0, ZeroColumn::kKeep);
    const at::Tensor product = at::matmul(matrix[0].t(), matrix[0]);
    EXPECT_TRUE(at::allclose(product, at::eye(columns), 1e-5, 1e-5)) << product;
    // The same space.
    const at::Tensor projected = at::matmul(matrix[0], at::matmul(matrix[0].t(), before[0]));
    EXPECT_TRUE(at::allclose(projected, before[0], 1e-4, 1e-4));
  }
}

// As where gradients have a lower rank than the approximation.
TEST(OrthogonalizeTest, DependentColumnsBecomeOrthogonalToo) {
  const at::Tensor one = at::randn({20}, at::detail::createCPUGenerator(3));
  at::Tensor matrix = at::stack({one, one * 1.7}, 1).unsqueeze(0);
  Orthogonalize(matrix, 0, ZeroColumn::kKeep);
  const at::Tensor product = at::matmul(matrix[0].t(), matrix[0]);
  EXPECT_LT(product[0][1].abs().item<float>(), 1e-4) << product;
}

TEST(OrthogonalizeTest, ZerosAreKeptOrReplaced) {
  for (const double epsilon : {0.0, 1e-8}) {
    at::Tensor matrix = at::zeros({1, 4, 2});
    matrix.select(2, 1).fill_(3);
    Orthogonalize(matrix, epsilon, ZeroColumn::kKeep);
    EXPECT_TRUE(
        at::allclose(matrix[0].t(), at::tensor({0, 0, 0, 0, 1, 1, 1, 1}).view({2, 4}) * 0.5));
    matrix = at::zeros({1, 4, 1});
    Orthogonalize(matrix, epsilon, ZeroColumn::kReplace);
    EXPECT_TRUE(at::equal(matrix, at::full({1, 4, 1}, 0.5)));
  }
}

TEST(PowerSgdTest, SendsWhatTheFormulaSays) {
  for (const double bucket_cap_mb : {25.0, 1e-4}) {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      GivenGradients run(kShapes, group,
                         PowerSgd({.matrix_approximation_rank = 2, .start_iter = 2}),
                         {.bucket_cap_mb = bucket_cap_mb});
      for (int step = 0; step < 5; ++step) {
        const std::vector<at::Tensor> results = run.Step(RandomGradients(kShapes, rank, step));
        const std::vector<at::Tensor> means = MeanOfRandom(kShapes, WorldSize(), step);
        for (const size_t i : {1, 2, 3}) {  // those that go as they are
          EXPECT_TRUE(at::allclose(results[i], means[i], 1e-5, 1e-6)) << "tensor " << i;
        }
        const int64_t plain = 7 + 4 + 1;
        EXPECT_EQ(run.bytes, 4 * (plain + (step < 2 ? 600 + 320 : (20 + 30) * 2 + (16 + 20) * 2)));
      }
    });
  }
}

// Each rank's gradient is a column of its own times a row that all have: the mean has rank one.
TEST(PowerSgdTest, GradientsOfLowRankAreExact) {
  for (const int64_t approximation : {1, 2, 4}) {
    RunRanks(3, [&](int rank, const GroupPtr& group) {
      const Shapes shapes = {{20, 30}, {16, 20}};
      GivenGradients run(shapes, group,
                         PowerSgd({.matrix_approximation_rank = approximation,
                                   .start_iter = 0,
                                   .min_compression_rate = 0.5,
                                   .use_error_feedback = false,
                                   .warm_start = false}));
      for (int step = 0; step < 4; ++step) {
        std::vector<at::Tensor> mine, expected;
        for (const auto& shape : shapes) {
          const at::Tensor row = at::linspace(-1, 1 + step, shape[1]);
          const auto column = [&](int r) { return at::arange(shape[0]).add(r * r + 1.0).sin(); };
          mine.push_back(at::outer(column(rank), row));
          expected.push_back(at::outer((column(0) + column(1) + column(2)) / 3, row));
        }
        const std::vector<at::Tensor> results = run.Step(mine);
        for (size_t i = 0; i < results.size(); ++i) {
          EXPECT_TRUE(at::allclose(results[i], expected[i], 1e-4, 1e-5))
              << "rank " << approximation;
        }
      }
    });
  }
}

// Relative to the sum of the true means, what 40 steps have left out. With feedback the residual of
// all steps is what the ranks still hold, so its share falls; without, it is that of one step.
double LeftOut(bool feedback) {
  double left_out = 0;
  RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
    const Shapes shapes = {{12, 15}};
    GivenGradients run(shapes, group, PowerSgd({.start_iter = 2, .use_error_feedback = feedback}));
    const at::Tensor mean = MeanOfRandom(shapes, WorldSize(), 0)[0];
    at::Tensor sum = at::zeros({12, 15});
    constexpr int kSteps = 40;
    for (int step = 0; step < 2 + kSteps; ++step) {
      const at::Tensor result = run.Step(RandomGradients(shapes, rank, 0))[0];
      if (step >= 2) sum += result;
    }
    if (Records(rank)) left_out = ((sum / kSteps - mean).norm() / mean.norm()).item<double>();
  });
  return left_out;
}

TEST(PowerSgdTest, ErrorFeedbackSendsWhatWasLeftOut) {
  const double without = LeftOut(false), with = LeftOut(true);
  if (testing::Test::IsSkipped()) return;  // over mpi, with another number of ranks
  EXPECT_GT(without, 0.5);
  EXPECT_LT(with, 0.25);
}

TEST(PowerSgdTest, AWarmStartFindsTheBestApproximation) {
  RunRanks(WorldSize(), [](int rank, const GroupPtr& group) {
    const Shapes shapes = {{12, 15}};
    const at::Tensor mean = MeanOfRandom(shapes, WorldSize(), 0)[0];
    const at::Tensor singular = std::get<1>(at::linalg_svd(mean));
    const double best = (mean.norm().square() - singular[0].square()).sqrt().item<double>();
    for (const bool warm : {true, false}) {
      GivenGradients run(
          shapes, group,
          PowerSgd({.start_iter = 2, .use_error_feedback = false, .warm_start = warm}));
      at::Tensor result;
      for (int step = 0; step < 60; ++step) {
        result = run.Step(RandomGradients(shapes, rank, 0))[0];
      }
      const double distance = (result - mean).norm().item<double>();
      if (warm) {
        EXPECT_NEAR(distance, best, 1e-3);
      } else {
        EXPECT_GT(distance, best + 1e-2);
      }
    }
  });
}

TEST(PowerSgdTest, AllRanksHaveTheSameBitsWithManyBuckets) {
  Shapes shapes;
  for (int64_t i = 0; i < 12; ++i) {
    shapes.push_back({10 + i, 12});
    shapes.push_back({5 + i});
  }
  for (const int64_t approximation : {1, 3}) {
    RunRanks(3, [&](int rank, const GroupPtr& group) {
      GivenGradients run(shapes, group,
                         PowerSgd({.matrix_approximation_rank = approximation,
                                   .start_iter = 2,
                                   .min_compression_rate = 1}),
                         {.bucket_cap_mb = 1e-5, .gradient_as_bucket_view = true});
      std::vector<at::Tensor> result;
      for (int step = 0; step < 30; ++step) result = run.Step(RandomGradients(shapes, rank, step));
      ExpectSameBitsOnAllRanks(group, result);
      // The logger cuts the list.
      const std::string sizes =
          run.model->parallel().GetDDPLoggingData().strs_map["rebuilt_bucket_sizes"];
      EXPECT_GE(std::count(sizes.begin(), sizes.end(), ','), 20) << sizes;
    });
  }
}

// PyTorch's hook returns NaN for these. The factors of a gradient of zeros are zeros, from which
// the next backward could not start.
TEST(PowerSgdTest, AGradientOfZerosIsNotTheEnd) {
  for (const int64_t approximation : {1, 2, 4}) {
    RunRanks(WorldSize(), [&](int, const GroupPtr& group) {
      GivenGradients run({{20, 30}}, group,
                         PowerSgd({.matrix_approximation_rank = approximation,
                                   .start_iter = 2,
                                   .min_compression_rate = 1}));
      const at::Tensor gradient = at::outer(at::arange(20.0f), at::arange(30.0f));
      for (int step = 0; step < 6; ++step) {
        const at::Tensor given = step == 3 ? at::zeros({20, 30}) : gradient;
        const at::Tensor result = run.Step({given})[0];
        EXPECT_TRUE(at::allclose(result, given, 1e-4, 1e-2))
            << "rank " << approximation << ", step " << step;
      }
    });
  }
}

// As under a loss scale: its step is skipped, and those after it are as good as ever. PyTorch's
// hook returns NaN from then on.
TEST(PowerSgdTest, AnOverflowIsNotTheEnd) {
  for (const int64_t approximation : {1, 2, 4}) {
    for (const bool feedback : {true, false}) {
      RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
        GivenGradients run({{20, 30}}, group,
                           PowerSgd({.matrix_approximation_rank = approximation,
                                     .start_iter = 2,
                                     .min_compression_rate = 1,
                                     .use_error_feedback = feedback}));
        const at::Tensor gradient = at::outer(at::arange(20.0f), at::arange(30.0f));
        for (int step = 0; step < 8; ++step) {
          // One rank alone overflows, in the first compressed step and in a later one.
          const bool overflows = step == 2 || step == 5;
          at::Tensor given = gradient.clone();
          if (overflows && rank == 0) given[3][4] = std::numeric_limits<float>::infinity();
          const at::Tensor result = run.Step({given})[0];
          if (overflows) {
            EXPECT_FALSE(result.isfinite().all().item<bool>());
          } else {
            EXPECT_TRUE(at::allclose(result, gradient, 1e-4, 1e-2))
                << "rank " << approximation << ", step " << step;
          }
        }
      });
    }
  }
}

// The first layout stays with find_unused_parameters, and buckets may change where there is no
// state. Five rows of input give gradients of rank 5 at most, so an approximation of that rank is
// the gradient but for rounding.
TEST(PowerSgdTest, WithUnusedParametersAndFromTheFirstStep) {
  for (const bool find_unused : {true, false}) {
    RunRanks(WorldSize(), [&](int rank, const GroupPtr& group) {
      auto model =
          *Wrap(SeededNet(), group, {.bucket_cap_mb = 1e-4, .find_unused_parameters = find_unused});
      const PowerSgdOptions options = {.matrix_approximation_rank = 8,
                                       .start_iter = 0,
                                       .min_compression_rate = 0.01,
                                       .use_error_feedback = false,
                                       .warm_start = false};
      const absl::Status status = Register(PowerSgd(options), group, model->parallel());
      ASSERT_TRUE(status.ok()) << status;
      for (int step = 0; step < 5; ++step) {
        model->zero_grad();
        model->forward(Input(rank, step), !find_unused || rank == 0).pow(2).sum().backward();
        const std::vector<at::Tensor> expected =
            MeanGradients<Net>(WorldSize(), [&](Net& net, int one) {
              return net.forward(Input(one, step), !find_unused || one == 0).pow(2).sum();
            });
        const std::vector<at::Tensor> gradients = Gradients(*model->module());
        for (size_t i = 0; i < expected.size(); ++i) {
          EXPECT_TRUE(at::allclose(gradients[i], expected[i], 1e-3, 1e-3))
              << "step " << step << ", tensor " << i;
        }
      }
      int64_t sent = 0;
      for (const at::Tensor& gradient : Gradients(*model->module())) {
        sent += 5 * 4 * ShapeFor(gradient.sizes(), options).sent();
      }
      EXPECT_EQ(model->parallel().comm_bytes(), sent);
    });
  }
}

// LibTorch counts the elements of their buckets otherwise.
// Whichever bucket is the last.
TEST(PowerSgdTest, CompressesBesideASparseBucket) {
  struct Table : torch::nn::Module {
    explicit Table(bool table_first) {
      const auto add_table = [&] {
        embedding = register_module(
            "embedding", torch::nn::Embedding(torch::nn::EmbeddingOptions(6, 2).sparse(true)));
      };
      if (table_first) add_table();
      matrix = register_parameter("matrix", at::zeros({20, 30}));
      if (!table_first) add_table();
    }
    at::Tensor forward(const at::Tensor& gradient) {
      return (matrix * gradient).sum() + embedding->forward(at::zeros({1}, at::kLong)).sum();
    }
    torch::nn::Embedding embedding{nullptr};
    at::Tensor matrix;
  };
  for (const bool table_first : {true, false}) {
    SCOPED_TRACE(table_first);
    RunRanks(2, [&](int rank, const GroupPtr& group) {
      auto model = *Wrap(std::make_shared<Table>(table_first), group, {.bucket_cap_mb = 1e-4});
      ASSERT_TRUE(Register(PowerSgd({.start_iter = 2}), group, model->parallel()).ok());
      std::vector<int64_t> sent;
      for (int step = 0; step < 4; ++step) {
        model->zero_grad();
        const int64_t before = model->parallel().comm_bytes().value();
        model->forward(RandomGradients({{20, 30}}, rank, step)[0]).backward();
        sent.push_back(model->parallel().comm_bytes().value() - before);
      }
      EXPECT_EQ(sent[1], sent[0]);
      EXPECT_LT(sent[2], sent[0]);
      EXPECT_EQ(sent[3], sent[2]);
    });
  }
}

// A model of kShapes with a hook of its own.
struct Hooked {
  Hooked(const GroupPtr& group, const PowerSgdOptions& options,
         const DataParallelOptions& parallel = {})
      : model(*Wrap(std::make_shared<Given>(kShapes), group, parallel)) {
    auto made = std::make_unique<PowerSgdHook>(group, options);
    hook = made.get();
    const absl::Status registered = model->register_comm_hook(std::move(made));
    EXPECT_TRUE(registered.ok()) << registered;
  }

  void Step(int rank, int step) { model->forward(RandomGradients(kShapes, rank, step)).backward(); }

  std::shared_ptr<DistributedDataParallel<Given>> model;
  PowerSgdHook* hook = nullptr;
};

TEST(PowerSgdTest, ALoadSaysWhatTheOptionsHaveNoUseFor) {
  RunRanks(2, [](int rank, const GroupPtr& group) {
    const PowerSgdOptions before = {.matrix_approximation_rank = 2, .start_iter = 2};
    Hooked saved(group, before);
    for (int step = 0; step < 4; ++step) saved.Step(rank, step);
    const checkpoint::State state = *saved.hook->state_dict();
    const auto notes_with = [&](const PowerSgdOptions& options) {
      PowerSgdHook hook(group, options);
      checkpoint::LoadNotes notes;
      const absl::Status loaded = hook.load_state_dict(state, notes);
      EXPECT_TRUE(loaded.ok()) << loaded;
      return notes.lines();
    };
    using Lines = std::vector<std::string>;
    const std::string shapes =
        "(saved with another matrix_approximation_rank or min_compression_rate)";
    EXPECT_EQ(notes_with(before), Lines());
    PowerSgdOptions now = before;
    now.matrix_approximation_rank = 1;
    EXPECT_EQ(notes_with(now), Lines{"without powersgd's factors " + shapes});
    now = before;
    now.min_compression_rate = 100;
    EXPECT_EQ(notes_with(now),
              Lines{"without powersgd's factors " + shapes + " and errors " + shapes});
    now = before;
    now.warm_start = false;
    EXPECT_EQ(notes_with(now), Lines{"without powersgd's factors (warm_start=false)"});
    now.use_error_feedback = false;
    EXPECT_EQ(notes_with(now), Lines{"without powersgd's factors (warm_start=false) and errors "
                                     "(use_error_feedback=false)"});
    now.warm_start = true;
    EXPECT_EQ(notes_with(now), Lines{"without powersgd's errors (use_error_feedback=false)"});
  });
}

TEST(PowerSgdTest, ALoadIntoOtherBucketsIsLogged) {
  for (const bool others : {false, true}) {
    std::atomic<bool> has_rank_0 = false;  // this process: over mpi one of two has
    testing::internal::CaptureStderr();
    RunRanks(2, [&](int rank, const GroupPtr& group) {
      if (rank == 0) has_rank_0 = true;
      const PowerSgdOptions options = {.start_iter = 2};
      Hooked saved(group, options), with_others(group, options, {.bucket_cap_mb = 1e-4});
      for (int step = 0; step < 4; ++step) saved.Step(rank, step);
      Hooked& loading = others ? with_others : saved;
      checkpoint::LoadNotes notes;
      const absl::Status loaded = loading.hook->load_state_dict(*saved.hook->state_dict(), notes);
      EXPECT_TRUE(loaded.ok()) << loaded;
      loading.Step(rank, 4);
    });
    const std::string printed = testing::internal::GetCapturedStderr();
    EXPECT_EQ(absl::StrContains(printed, "are of buckets of other gradients"), others && has_rank_0)
        << printed;
  }
}

TEST(PowerSgdTest, ComplexGradientsAreAveragedWithoutCompression) {
  struct ComplexGiven : torch::nn::Module {
    at::Tensor forward(const at::Tensor& gradient, const at::Tensor& of_real) {
      return at::view_as_real(weight.mul(gradient.conj())).select(2, 0).sum() +
             (real * of_real).sum();
    }
    at::Tensor weight{register_parameter("weight", at::zeros({20, 30}, at::kComplexFloat))};
    at::Tensor real{register_parameter("real", at::zeros({20, 30}))};
  };
  const auto complex_of = [](int rank, int step) {
    const Shapes shape = {{20, 30, 2}};
    return at::view_as_complex(RandomGradients(shape, rank, step)[0]);
  };
  for (const std::string name : {"powersgd", "fp16_compress", "allreduce"}) {
    CommHookOptions options = PowerSgd({.start_iter = 2});
    options.name = name;
    RunRanks(2, [&](int rank, const GroupPtr& group) {
      auto model = *Wrap(std::make_shared<ComplexGiven>(), group);
      ASSERT_TRUE(Register(options, group, model->parallel()).ok());
      for (int step = 0; step < 4; ++step) {
        model->zero_grad();
        model->forward(complex_of(rank, step), at::ones({20, 30}) * rank).backward();
        const at::Tensor mean = (complex_of(0, step) + complex_of(1, step)) / 2;
        const double tolerance = name == "fp16_compress" ? 1e-2 : 1e-6;
        EXPECT_TRUE(at::allclose(model->module()->weight.grad(), mean, tolerance, tolerance))
            << name << " step " << step;
        EXPECT_TRUE(at::allclose(model->module()->real.grad(), at::full({20, 30}, 0.5), 1e-2));
      }
    });
  }
}

}  // namespace
}  // namespace ddp::hooks
