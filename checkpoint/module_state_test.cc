#include "checkpoint/module_state.h"

#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace ddp::checkpoint {
namespace {

// A layer with a buffer and an undefined parameter, like the bias of Linear without bias.
struct Layer : torch::nn::Module {
  explicit Layer(int64_t n) {
    weight = register_parameter("weight", torch::full({n, 2}, static_cast<double>(n)));
    register_parameter("bias", {}, false);
    register_buffer("count", torch::zeros({}, torch::kLong));
  }
  torch::Tensor weight;
};

struct Net : torch::nn::Module {
  Net() {
    register_module("first", std::make_shared<Layer>(3));
    register_module("second", std::make_shared<Layer>(4));
    scale = register_parameter("scale", torch::ones({1}));
  }
  torch::Tensor scale;
};

std::vector<std::string> Names(const c10::impl::GenericDict& state) {
  std::vector<std::string> names;
  for (const auto& entry : state) names.push_back(entry.key().toStringRef());
  return names;
}

c10::impl::GenericDict Clone(const c10::impl::GenericDict& state, const std::string& prefix = "") {
  c10::impl::GenericDict copy(c10::StringType::get(), c10::AnyType::get());
  for (const auto& entry : state) {
    copy.insert(prefix + entry.key().toStringRef(), entry.value().toTensor().clone());
  }
  return copy;
}

TEST(ModuleStateTest, NamesAndOrderAreThoseOfPython) {
  const Net net;
  const std::vector<std::string> expected = {"scale", "first.weight", "first.count",
                                             "second.weight", "second.count"};
  const auto state = ModuleState(net);
  EXPECT_EQ(Names(state), expected);
  for (const auto& entry : state) EXPECT_FALSE(entry.value().toTensor().requires_grad());
}

TEST(ModuleStateTest, LoadsInPlaceAndConverts) {
  Net net;
  c10::impl::GenericDict saved = Clone(ModuleState(net));
  saved.insert_or_assign("first.weight", torch::full({3, 2}, 0.5, torch::kBFloat16));
  saved.insert_or_assign("second.count", torch::full({}, 9, torch::kLong));
  const void* memory = net.scale.data_ptr();
  const absl::Status status = LoadModuleState(net, saved);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(net.scale.data_ptr(), memory);
  const auto named = net.named_parameters();
  EXPECT_EQ(named["first.weight"].scalar_type(), torch::kFloat);
  EXPECT_TRUE(named["first.weight"].requires_grad());
  EXPECT_TRUE(torch::equal(named["first.weight"].detach(), torch::full({3, 2}, 0.5)));
  EXPECT_EQ(net.named_buffers()["second.count"].item<int64_t>(), 9);
}

TEST(ModuleStateTest, TakesTheNamesThatPythonsWrapperLeaves) {
  Net net;
  c10::impl::GenericDict saved = Clone(ModuleState(net), "module.");
  EXPECT_TRUE(LoadModuleState(net, saved).ok());
  saved.insert("scale", torch::ones({1}));  // not all of them
  EXPECT_FALSE(LoadModuleState(net, saved).ok());
}

TEST(ModuleStateTest, ListsAllThatDoesNotFitAndChangesNothing) {
  Net net;
  c10::impl::GenericDict saved(c10::StringType::get(), c10::AnyType::get());
  saved.insert("scale", torch::full({1}, 5.0));
  saved.insert("first.weight", torch::zeros({3, 3}));
  saved.insert("third.weight", torch::zeros({1}));
  saved.insert("first.count", torch::zeros({}, torch::kLong));
  saved.insert("second.weight", torch::zeros({4, 2}));
  const absl::Status status = LoadModuleState(net, saved);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "model state does not fit the model: "
            "1 missing in the checkpoint: second.count; "
            "1 unknown to the model: third.weight; "
            "1 of another shape: first.weight (model [3, 2], checkpoint [3, 3])");
  EXPECT_EQ(net.scale.item<float>(), 1);
}

TEST(ModuleStateTest, ListsTheFirstTenOfMany) {
  Net net;
  c10::impl::GenericDict saved = Clone(ModuleState(net));
  for (int i = 10; i < 35; ++i) saved.insert(absl::StrCat("x", i), torch::zeros({1}));
  const absl::Status status = LoadModuleState(net, saved);
  EXPECT_TRUE(absl::StrContains(status.message(), "25 unknown to the model: x10, ")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "x19, …")) << status;
  EXPECT_FALSE(absl::StrContains(status.message(), "x20")) << status;
}

TEST(ModuleStateTest, RefusesWhatIsNoDictOfTensors) {
  Net net;
  c10::impl::GenericDict saved = Clone(ModuleState(net));
  saved.insert_or_assign("scale", 3);
  EXPECT_EQ(LoadModuleState(net, saved).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(LoadModuleState(net, torch::zeros({1})).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(LoadModuleState(net, c10::IValue()).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ddp::checkpoint
