#include "checkpoint/module_state.h"

#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>

#include <memory>
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

TEST(ModuleStateTest, ExpandedTensorsStayExpanded) {
  struct Masked : torch::nn::Module {
    explicit Masked(double value) {
      mask = register_buffer("mask", torch::full({1, 3}, value).expand({2, 3}));
      scale = register_parameter("scale", torch::full({1}, value).expand({4}), false);
    }
    torch::Tensor mask, scale;
  };
  Masked net(1);
  const absl::Status loaded = LoadModuleState(net, Clone(ModuleState(Masked(5))));
  ASSERT_TRUE(loaded.ok()) << loaded;
  EXPECT_TRUE(at::equal(net.mask, torch::full({2, 3}, 5.)));
  EXPECT_TRUE(at::equal(net.scale, torch::full({4}, 5.)));
  EXPECT_EQ(net.mask.stride(0), 0);
}

TEST(ModuleStateTest, LoadsInPlaceAndConverts) {
  Net net;
  c10::impl::GenericDict saved = Clone(ModuleState(net));
  saved.insert_or_assign("first.weight", torch::full({3, 2}, 0.5, torch::kBFloat16));
  saved.insert_or_assign("second.count", torch::full({}, 9, torch::kLong));
  const void* memory = net.scale.data_ptr();
  std::vector<std::string> notes;
  const absl::Status status = LoadModuleState(net, saved, &notes);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(notes, std::vector<std::string>({"model state: 1 converted: first.weight (model Float, "
                                             "checkpoint BFloat16)"}));
  EXPECT_EQ(net.scale.data_ptr(), memory);
  const auto named = net.named_parameters();
  EXPECT_EQ(named["first.weight"].scalar_type(), torch::kFloat);
  EXPECT_TRUE(named["first.weight"].requires_grad());
  EXPECT_TRUE(torch::equal(named["first.weight"].detach(), torch::full({3, 2}, 0.5)));
  EXPECT_EQ(net.named_buffers()["second.count"].item<int64_t>(), 9);
}

TEST(ModuleStateTest, TakesTheNamesThatPythonsWrappersLeave) {
  const Net net;
  for (const char* prefix : {"module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.",
                             "module.module.", "module._orig_mod.module."}) {
    Net loaded;
    c10::impl::GenericDict saved = Clone(ModuleState(net), prefix);
    saved.insert_or_assign(absl::StrCat(prefix, "scale"), torch::full({1}, 7.0));
    std::vector<std::string> notes;
    const absl::Status status = LoadModuleState(loaded, saved, &notes);
    ASSERT_TRUE(status.ok()) << prefix << ": " << status;
    EXPECT_EQ(loaded.scale.item<float>(), 7);
    ASSERT_FALSE(notes.empty());
    EXPECT_TRUE(absl::StrContains(notes[0], "from 5 names")) << notes[0];
    const bool both = absl::StrContains(prefix, "module.") && absl::StrContains(prefix, "_orig");
    EXPECT_EQ(notes.size(), both ? 2u : 1u) << prefix;
    EXPECT_TRUE(LoadModuleState(loaded, saved).ok());
    saved.insert("scale", torch::ones({1}));  // two of one name
    EXPECT_FALSE(LoadModuleState(loaded, saved).ok());
  }
}

// torch.compile of a part of the model.
TEST(ModuleStateTest, TakesTheNamesOfWrappedParts) {
  Net net;
  c10::impl::GenericDict saved(c10::StringType::get(), c10::AnyType::get());
  for (const auto& entry : ModuleState(net)) {
    const std::string name = entry.key().toStringRef();
    saved.insert(absl::StrContains(name, "first.") ? "first._orig_mod." + name.substr(6) : name,
                 entry.value().toTensor().clone());
  }
  std::vector<std::string> notes;
  const absl::Status status = LoadModuleState(net, saved, &notes);
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_TRUE(absl::StrContains(notes[0], "'_orig_mod.' from 2 names")) << notes[0];
}

// A model that has such names itself.
struct Wrapped : torch::nn::Module {
  Wrapped() { register_module("module", std::make_shared<Layer>(3)); }
};

TEST(ModuleStateTest, NamesOfTheModelStay) {
  Wrapped net;
  std::vector<std::string> notes;
  EXPECT_TRUE(LoadModuleState(net, Clone(ModuleState(net)), &notes).ok());
  EXPECT_TRUE(notes.empty());
  EXPECT_FALSE(LoadModuleState(net, Clone(ModuleState(*net.children()[0]))).ok());
}

struct Norms : torch::nn::Module {
  Norms() {
    register_module("norm", torch::nn::BatchNorm2d(2));
    register_buffer("num_batches_tracked", torch::zeros({}, torch::kLong));
  }
};

TEST(ModuleStateTest, BatchNormWithoutItsCounterIsTaken) {
  Norms net;
  const auto counter = net.named_buffers()["norm.num_batches_tracked"];
  counter.fill_(5);
  c10::impl::GenericDict saved = Clone(ModuleState(net));
  EXPECT_EQ(saved.erase("norm.num_batches_tracked"), 1u);
  saved.insert_or_assign("norm.running_mean", torch::full({2}, 3.0));
  std::vector<std::string> notes;
  const absl::Status status = LoadModuleState(net, saved, &notes);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(counter.item<int64_t>(), 5);
  EXPECT_EQ(net.named_buffers()["norm.running_mean"][0].item<float>(), 3);
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_TRUE(absl::StrContains(notes[0], ": norm.num_batches_tracked")) << notes[0];
  // A tensor of that name elsewhere, and a BatchNorm of which more is missing.
  EXPECT_EQ(saved.erase("num_batches_tracked"), 1u);
  const absl::Status missing = LoadModuleState(net, saved);
  EXPECT_TRUE(absl::StrContains(missing.message(), "1 missing")) << missing;
  saved = Clone(ModuleState(net));
  EXPECT_EQ(saved.erase("norm.num_batches_tracked"), 1u);
  EXPECT_EQ(saved.erase("norm.running_mean"), 1u);
  EXPECT_FALSE(LoadModuleState(net, saved).ok());
}

TEST(ModuleStateTest, WhatCannotBeConvertedIsNamedAndNothingChanges) {
  Net net;
  c10::impl::GenericDict saved = Clone(ModuleState(net));
  saved.insert_or_assign("scale", torch::full({1}, c10::complex<float>(5, 1)));
  saved.insert_or_assign("second.weight", torch::zeros({4, 2}).to_sparse());
  saved.insert_or_assign("first.weight", torch::zeros({3, 2}));
  saved.insert_or_assign("first.count", torch::full({}, 0.5));
  saved.insert_or_assign("second.count", torch::ones({}, torch::kBool));
  const absl::Status status = LoadModuleState(net, saved);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(status.message(),
                                "4 that cannot be converted: scale (model Float, checkpoint "
                                "ComplexFloat), first.count (model Long, checkpoint Float), "
                                "second.weight (model Float, checkpoint Float, Sparse), "
                                "second.count (model Long, checkpoint Bool)"))
      << status;
  EXPECT_EQ(net.named_parameters()["first.weight"][0][0].item<float>(), 3);
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
  EXPECT_EQ(CheckModuleState(net, saved), status);
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

TEST(InitModuleTest, WeightsAreFoundWhereProgramsPutThem) {
  const Net net;
  c10::impl::GenericDict root(c10::StringType::get(), c10::AnyType::get());
  root.insert("epoch", 3);
  const auto none = WeightsIn(root);
  EXPECT_TRUE(absl::StrContains(none.status().message(), "but 1 keys: epoch")) << none.status();
  root.insert("state_dict", ModuleState(net));
  EXPECT_EQ(WeightsIn(root).value().size(), 5u);
  root.insert("model", torch::zeros({1}));  // a parameter of that name
  EXPECT_EQ(WeightsIn(root).value().size(), 5u);
  EXPECT_EQ(WeightsIn(ModuleState(net)).value().size(), 5u);
}

TEST(InitModuleTest, OnlyFloatingPointNumbersAreConverted) {
  Net net;
  c10::impl::GenericDict saved = Clone(ModuleState(net));
  saved.insert_or_assign("first.weight", torch::full({3, 2}, 0.5, torch::kBFloat16));
  std::vector<std::string> notes;
  const auto taken = InitModule(net, saved, {}, notes);
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_EQ(*taken, 5);
  EXPECT_EQ(notes, std::vector<std::string>(
                       {"1 converted: first.weight (model Float, checkpoint BFloat16)"}));
  EXPECT_EQ(net.named_parameters()["first.weight"][0][0].item<float>(), 0.5);
  saved.insert_or_assign("first.weight", torch::ones({3, 2}));
  saved.insert_or_assign("first.count", torch::zeros({}, torch::kInt));
  saved.insert("extra", "text");
  const auto refused = InitModule(net, saved, {}, notes);
  EXPECT_EQ(refused.status().message(),
            "the weights do not fit the model: 1 unknown to the model: extra (no tensor); 1 that "
            "cannot be converted: first.count (model Long, checkpoint Int)");
  EXPECT_EQ(net.named_parameters()["first.weight"][0][0].item<float>(), 0.5);
  notes.clear();
  EXPECT_EQ(InitModule(net, saved, {.strict = false}, notes).value(), 4);
  EXPECT_EQ(notes, std::vector<std::string>(
                       {"1 in the checkpoint found no place: extra (no tensor)",
                        "1 in the model kept their initial values: first.count (model Long, "
                        "checkpoint Int)"}));
}

// Programs that save a tensor once save one of its names.
TEST(InitModuleTest, OneNameOfATiedTensorWillDo) {
  struct Tied : torch::nn::Module {
    Tied() {
      embed = register_parameter("embed", torch::zeros({2}));
      register_parameter("head", embed);
    }
    torch::Tensor embed;
  };
  Tied net;
  c10::impl::GenericDict saved(c10::StringType::get(), c10::AnyType::get());
  saved.insert("head", torch::ones({2}));
  std::vector<std::string> notes;
  const auto taken = InitModule(net, saved, {}, notes);
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_EQ(net.embed[1].item<float>(), 1);
}

}  // namespace
}  // namespace ddp::checkpoint
