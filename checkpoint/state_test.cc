#include "checkpoint/state.h"

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace ddp::checkpoint {
namespace {

// An optimizer's state, cut by elements: keys of str and int, and one with a slash.
State Sharded() {
  c10::impl::GenericDict by_number(c10::IntType::get(), c10::AnyType::get());
  c10::impl::GenericDict first = NewTree();
  first.insert("exp_avg", at::zeros({8}));
  by_number.insert(int64_t{0}, first);
  c10::impl::GenericDict optimizer = NewTree();
  optimizer.insert("state", by_number);
  State state;
  state.root.insert("optimizer", optimizer);
  state.root.insert("a/b", at::zeros({2, 3}));
  state.root.insert("text", "x");
  state.shards["optimizer/state/0/exp_avg"] = {{6, 4}, FlatRange{5, 13}};
  state.shards["a/b"] = {{6, 4}, Box{{1, 1}, {2, 3}}};
  return state;
}

TEST(StateTest, ShardsFitTheirTensors) {
  EXPECT_TRUE(CheckShards(Sharded()).ok()) << CheckShards(Sharded());
  EXPECT_TRUE(CheckShards(State()).ok());
}

TEST(StateTest, WhatDoesNotFitIsNamed) {
  const auto refused = [](const std::string& path, const Shard& shard, absl::string_view what) {
    State state = Sharded();
    state.shards[path] = shard;
    const absl::Status status = CheckShards(state);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << path;
    EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat("'", path, "'"))) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
  };
  const Shard range{{6, 4}, FlatRange{5, 13}};
  refused("a/b", range, "shape [2, 3] instead of [8]");
  refused("optimizer/state/0/exp_avg", {{6, 4}, FlatRange{5, 14}}, "[9]");
  refused("optimizer/state/0/exp_avg", {{3, 4}, FlatRange{5, 13}}, "12 elements");
  refused("optimizer/state/1/exp_avg", range, "no such tensor");
  refused("optimizer/state/0", range, "no such tensor");
  refused("optimizer/state/0/exp_avg/x", range, "no such tensor");
  refused("text", range, "no such tensor");
  refused("a", range, "no such tensor");
}

}  // namespace
}  // namespace ddp::checkpoint
