#include "checkpoint/state.h"

#include <ATen/Functions.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace ddp::checkpoint {
namespace {

// An optimizer's state, cut by elements, with keys of str and int.
State Sharded() {
  c10::impl::GenericDict by_number(c10::IntType::get(), c10::AnyType::get());
  c10::impl::GenericDict first = NewTree();
  first.insert("step", 3);
  by_number.insert(int64_t{0}, first);
  c10::impl::GenericDict optimizer = NewTree();
  optimizer.insert("state", by_number);
  State state;
  state.root.insert("optimizer", optimizer);
  state.root.insert("text", "x");
  state.sharded["optimizer/state/0/exp_avg"] = {
      .global_shape = {6, 4},
      .parts = {{FlatRange{5, 13}, at::zeros({8})}, {FlatRange{20, 21}, at::zeros({1})}}};
  state.sharded["a"] = {.global_shape = {6, 4},
                        .dtype = at::kLong,
                        .parts = {{Box{{1, 1}, {2, 3}}, at::zeros({2, 3}, at::kLong)}}};
  state.sharded["nothing here"] = {.global_shape = {7}};
  return state;
}

TEST(StateTest, KeysInPaths) {
  EXPECT_EQ(KeyText("fc.weight"), "fc.weight");
  EXPECT_EQ(KeyText(int64_t{-7}), "-7");
  EXPECT_EQ(KeyText(true), "True");
  EXPECT_EQ(KeyText(false), "False");
  EXPECT_EQ(KeyText(0.5), "0.5");
  EXPECT_EQ(KeyText(0.1), "0.1");
  EXPECT_EQ(KeyText(-3.0), "-3.0");
}

TEST(StateTest, KindsAreCalledAsInPython) {
  EXPECT_EQ(KindText(c10::impl::GenericList(c10::AnyType::get())), "a list");
  EXPECT_EQ(KindText(c10::List<int64_t>({1})), "a list");
  EXPECT_EQ(KindText(c10::ivalue::Tuple::create({c10::IValue(1), 2})), "a tuple");
  EXPECT_EQ(KindText(NewTree()), "a dict");
  EXPECT_EQ(KindText(at::ones({2})), "a tensor");
  EXPECT_EQ(KindText(7), "an int");
  EXPECT_EQ(KindText(0.5), "a float");
  EXPECT_EQ(KindText(true), "a bool");
  EXPECT_EQ(KindText("text"), "a str");
  EXPECT_EQ(KindText(c10::IValue()), "None");
}

TEST(StateTest, PartsFitTheirTensors) {
  EXPECT_TRUE(CheckShards(Sharded()).ok()) << CheckShards(Sharded());
  EXPECT_TRUE(CheckShards(State()).ok());
  const std::map<std::string, TensorParts> parts = PartsOf(Sharded());
  EXPECT_EQ(parts.at("a").dtype, "int64");
  EXPECT_EQ(parts.at("nothing here").global_shape, std::vector<int64_t>{7});
  EXPECT_EQ(parts.at("optimizer/state/0/exp_avg").parts.size(), 2u);
}

TEST(StateTest, WhatDoesNotFitIsNamed) {
  const auto refused = [&](const std::string& path, const ShardedTensor& tensor,
                           absl::string_view what) {
    State state = Sharded();
    state.sharded[path] = tensor;
    const absl::Status status = CheckShards(state);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << path;
    EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat("'", path, "'"))) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
  };
  const auto of = [](std::vector<int64_t> shape, const Part& part, const at::Tensor& values) {
    return ShardedTensor{.global_shape = std::move(shape), .parts = {{part, values}}};
  };
  const at::Tensor eight = at::zeros({8});
  refused("b", of({6, 4}, FlatRange{5, 13}, at::zeros({2, 3})), "shape [2, 3] instead of [8]");
  refused("b", of({6, 4}, FlatRange{5, 14}, eight), "instead of [9]");
  refused("b", of({3, 4}, FlatRange{5, 13}, eight), "12 elements");
  refused("b", of({6, 4}, FlatRange{5, 13}, eight.to(at::kDouble)), "instead of Float");
  refused("b", of({6, 4}, FlatRange{5, 13}, at::Tensor()), "no tensor");
  refused("b", ShardedTensor{.global_shape = {6, 4}, .memory_order = {0, 2}}, "no order");
  refused("text", of({6, 4}, FlatRange{5, 13}, eight), "a value there");
  refused("text/below", of({6, 4}, FlatRange{5, 13}, eight), "a value there");
  refused("optimizer/state/0", of({6, 4}, FlatRange{5, 13}, eight), "a value there");
  refused("optimizer/state/0/step", of({6, 4}, FlatRange{5, 13}, eight), "a value there");
}

TEST(StateTest, ValuesArePutWhereTheirPathLeads) {
  const State state = Sharded();
  ASSERT_TRUE(InsertAt(state.root, "optimizer/state/0/exp_avg", 1).ok());
  ASSERT_TRUE(InsertAt(state.root, "optimizer/state/1/exp_avg", 2).ok());
  ASSERT_TRUE(InsertAt(state.root, "new/one", 3).ok());
  const auto states = state.root.at("optimizer").toGenericDict().at("state").toGenericDict();
  EXPECT_EQ(states.at(int64_t{0}).toGenericDict().at("exp_avg").toInt(), 1);
  EXPECT_EQ(states.at(int64_t{1}).toGenericDict().at("exp_avg").toInt(), 2);
  EXPECT_EQ(state.root.at("new").toGenericDict().at("one").toInt(), 3);
  EXPECT_FALSE(InsertAt(state.root, "new/one", 3).ok());
  EXPECT_FALSE(InsertAt(state.root, "text/x", 3).ok());
}

// Cuts of any kind, in any order of dimensions, make up the whole again.
TEST(StateTest, PartsMakeUpTheWhole) {
  const at::Tensor whole = at::arange(2 * 3 * 4 * 5, at::kFloat).reshape({2, 3, 4, 5});
  const auto expect_whole = [&](const std::vector<Part>& parts, const std::vector<int64_t>& order) {
    for (const at::MemoryFormat format :
         {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
      const at::Tensor copy = at::zeros_like(whole, format);
      for (const Part& part : parts) {
        CopyPart(PartOf(whole.contiguous(format), part, order), part, order, copy);
      }
      EXPECT_TRUE(at::equal(copy, whole));
    }
  };
  for (const std::vector<int64_t>& order :
       {std::vector<int64_t>(), std::vector<int64_t>{0, 2, 3, 1},
        std::vector<int64_t>{3, 1, 0, 2}}) {
    expect_whole({FlatRange{0, 7}, FlatRange{7, 50}, FlatRange{50, 120}}, order);
  }
  expect_whole({Box{{1, 0, 0, 0}, {1, 3, 4, 5}}, Box{{0, 0, 0, 0}, {1, 3, 4, 5}}}, {});
  expect_whole({Whole{}}, {});
}

TEST(StateTest, DtypesByName) {
  EXPECT_EQ(DtypeName(at::kBFloat16), "bfloat16");
  EXPECT_EQ(DtypeOfName("float8_e5m2"), at::kFloat8_e5m2);
  EXPECT_EQ(DtypeName(at::kQInt8), "");
  EXPECT_EQ(DtypeOfName("float31"), at::ScalarType::Undefined);
}

}  // namespace
}  // namespace ddp::checkpoint
