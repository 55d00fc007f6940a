// Over random parameter sets: the state survives every change of world size and partition, and the
// plan counts it to the byte.

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ddp/zero/memory_plan.h"
#include "ddp/zero/zero_testing.h"

namespace ddp::zero {
namespace {

using optim::Dict;

struct Shape {
  int64_t numel;
  at::ScalarType dtype;
  int group;
};

std::vector<Shape> RandomShapes(std::mt19937_64& random) {
  const at::ScalarType dtypes[] = {at::kFloat, at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};
  std::vector<Shape> shapes(1 + random() % 9);
  for (Shape& shape : shapes) {
    const int64_t most = random() % 8 == 0 ? 1'000'000 : random() % 2 == 0 ? 40 : 5'000;
    shape = {static_cast<int64_t>(random() % (most + 1)), dtypes[random() % 5],
             static_cast<int>(random() % 2)};
  }
  ++shapes[0].numel;  // so that there is state
  return shapes;
}

std::vector<torch::optim::OptimizerParamGroup> ParametersOf(const std::vector<Shape>& shapes) {
  std::vector<std::vector<at::Tensor>> groups(2);
  for (const Shape& shape : shapes) {
    const at::Tensor values = (at::arange(shape.numel, at::kFloat) * 0.01).cos().to(shape.dtype);
    groups[shape.group].push_back(values.requires_grad_());
  }
  std::vector<torch::optim::OptimizerParamGroup> param_groups;
  for (auto& group : groups) param_groups.emplace_back(std::move(group));
  return param_groups;
}

// As all ranks have it, also where it was not averaged.
void SetGradients(torch::optim::Optimizer& optimizer, int step) {
  for (auto& group : optimizer.param_groups()) {
    for (at::Tensor& parameter : group.params()) {
      const at::Tensor values = (at::arange(parameter.numel(), at::kFloat) * 0.1 + step).sin();
      parameter.mutable_grad() = values.to(parameter.scalar_type());
    }
  }
}

Dict Copied(const Dict& dict) { return c10::IValue(dict).deepcopy().toGenericDict(); }

void ExpectSameState(const Dict& a, const Dict& b, const std::string& what) {
  const auto one = a.at("state").toGenericDict(), other = b.at("state").toGenericDict();
  ASSERT_GT(one.size(), 0) << what;
  ASSERT_EQ(one.size(), other.size()) << what;
  EXPECT_TRUE(a.at("param_groups") == b.at("param_groups")) << what;
  for (const auto& entry : one) {
    const auto mine = entry.value().toGenericDict();
    const auto theirs = other.at(entry.key()).toGenericDict();
    ASSERT_EQ(mine.size(), theirs.size()) << what;
    for (const auto& value : mine) {
      EXPECT_TRUE(at::equal(value.value().toTensor(), theirs.at(value.key()).toTensor()))
          << what << ": parameter " << entry.key().toInt() << " '" << value.key().toStringRef()
          << "'";
    }
  }
}

// Ranges by group and dtype, in the order in which these appear.
std::vector<PlannedRange> RangesOf(const std::vector<Shape>& shapes, int64_t entries) {
  std::map<std::pair<int, at::ScalarType>, PlannedRange> ranges;
  for (const Shape& shape : shapes) {
    const bool reduced = shape.dtype == at::kHalf || shape.dtype == at::kBFloat16;
    PlannedRange& range = ranges[{shape.group, shape.dtype}];
    range.element_bytes = static_cast<int64_t>(c10::elementSize(shape.dtype));
    range.state_bytes = reduced ? 4 * entries + 4 : range.element_bytes * entries;
    range.dtype = static_cast<int>(shape.dtype);
    range.numels.push_back(shape.numel);
  }
  std::vector<PlannedRange> list;
  for (auto& [key, range] : ranges) list.push_back(std::move(range));
  return list;
}

TEST(ZeroPropertyTest, StateAndPlanOfRandomParameters) {
  std::mt19937_64 random(11);
  const std::vector<NamedOptimizer> optimizers = Optimizers();
  for (int round = 0; round < 24; ++round) {
    const std::vector<Shape> shapes = RandomShapes(random);
    const NamedOptimizer& optimizer = optimizers[random() % optimizers.size()];
    const auto some_options = [&] {
      ZeroOptions options;
      options.stage = 1;
      options.partition = random() % 2 == 0 ? "flat" : "tensor";
      return options;
    };
    const ZeroOptions before = some_options(), after = some_options();
    const int ranks_before = 1 + static_cast<int>(random() % 4);
    const int ranks_after = 1 + static_cast<int>(random() % 4);
    const std::string what = absl::StrCat(
        "round ", round, ": ", optimizer.name, ", ", shapes.size(), " parameters, ", ranks_before,
        " ranks ", before.partition, ", then ", ranks_after, " ranks ", after.partition);
    // After two steps, and after a third without an interruption.
    Dict saved = optim::NewDict(), expected = optim::NewDict();
    std::vector<at::Tensor> parameters, expected_parameters;
    const auto values_of = [](const torch::optim::Optimizer& zero) {
      std::vector<at::Tensor> values;
      for (const auto& group : zero.param_groups()) {
        for (const at::Tensor& parameter : group.params()) {
          values.push_back(parameter.detach().clone());
        }
      }
      return values;
    };
    std::vector<int64_t> state_bytes(ranks_before);
    RunRanks(ranks_before, [&](int rank, const GroupPtr& group) {
      auto zero =
          *ZeroRedundancyOptimizer::Create(ParametersOf(shapes), group, optimizer.make, before);
      zero->param_groups()[0].options().set_lr(0.0123);
      for (int step = 0; step < 2; ++step) {
        SetGradients(*zero, step);
        zero->step();
      }
      const auto local = zero->LocalStates();
      ASSERT_TRUE(local.ok()) << local.status();
      for (const LocalState& state : *local) {
        for (const auto& entry : state.entries) {
          const at::Tensor& value = entry.value().toTensor();
          if (value.dim() > 0) state_bytes[rank] += static_cast<int64_t>(value.nbytes());
        }
      }
      const Dict whole = *zero->ConsolidateStateDict(0);
      if (rank == 0) {
        saved = Copied(whole);
        parameters = values_of(*zero);
      }
      SetGradients(*zero, 2);
      zero->step();
      const Dict later = *zero->ConsolidateStateDict(0);
      if (rank == 0) {
        expected = Copied(later);
        expected_parameters = values_of(*zero);
      }
    });
    const auto options =
        optimizer.make({torch::optim::OptimizerParamGroup(std::vector<at::Tensor>())});
    const auto entries = (*optim::KindOf(*options))->PerElement(options->defaults()).size();
    const MemoryPlan plan =
        PlanMemory(RangesOf(shapes, static_cast<int64_t>(entries)),
                   {.world_size = ranks_before, .stage = 1, .partition = before.partition});
    EXPECT_EQ(*std::max_element(state_bytes.begin(), state_bytes.end()), plan.state) << what;

    RunRanks(ranks_after, [&](int rank, const GroupPtr& group) {
      auto zero =
          *ZeroRedundancyOptimizer::Create(ParametersOf(shapes), group, optimizer.make, after);
      {
        const at::NoGradGuard no_grad;
        auto value = parameters.begin();
        for (auto& group : zero->param_groups()) {
          for (at::Tensor& parameter : group.params()) parameter.copy_(*value++);
        }
      }
      SpoilOptions(*zero);
      ASSERT_EQ(zero->LoadStateDict(saved), absl::OkStatus()) << what;
      SetGradients(*zero, 2);
      zero->step();
      const Dict again = *zero->ConsolidateStateDict(ranks_after - 1);
      if (rank == ranks_after - 1) ExpectSameState(expected, again, what);
      ExpectSameBits(values_of(*zero), expected_parameters, what);
    });
  }
}

}  // namespace
}  // namespace ddp::zero
