#include "checkpoint/stateful.h"

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace ddp::checkpoint {
namespace {

Dict DictOf(const std::string& key, const c10::IValue& value) {
  Dict dict = NewTree();
  dict.insert(key, value);
  return dict;
}

TEST(StatefulTest, WhatIsInsertedIsTakenOutAgainAndTheRestStays) {
  const Component hook = {.name = "hook"};
  const Component run = {.name = "run", .top_level = {"epoch"}, .top_level_per_rank = {"rng"}};
  const Component schedule = {.name = "scheduler", .top_level = {"progress"}};
  State of_hook, of_run, of_schedule;
  of_hook.root = DictOf("count", 7);
  of_hook.sharded["factors"] = {.global_shape = {4}, .parts = {{FlatRange{2, 4}, at::ones({2})}}};
  of_hook.per_rank = {{0, DictOf("errors", 10)}, {1, DictOf("errors", 11)}};
  of_run.root = DictOf("epoch", 3);
  of_run.per_rank = {{0, DictOf("rng", 20)}, {1, DictOf("rng", 21)}};
  of_schedule.root = DictOf("progress", 0.5);
  of_schedule.root.insert("gamma", 0.1);

  State state;
  ASSERT_TRUE(InsertComponent(hook, of_hook, state).ok());
  ASSERT_TRUE(InsertComponent(run, of_run, state).ok());
  ASSERT_TRUE(InsertComponent(schedule, of_schedule, state).ok());
  state.root.insert("extra", 1);
  EXPECT_EQ(state.root.size(), 5);
  EXPECT_EQ(state.root.at("epoch").toInt(), 3);
  EXPECT_EQ(state.root.at("progress").toDouble(), 0.5);
  EXPECT_EQ(state.root.at("scheduler").toGenericDict().size(), 1);
  EXPECT_EQ(state.per_rank.at(1).at("rng").toInt(), 21);
  EXPECT_EQ(state.per_rank.at(1).at("hook").toGenericDict().at("errors").toInt(), 11);
  EXPECT_EQ(state.sharded.count("hook/factors"), 1);

  State rest = DetachedCopy(state);
  const auto hook_again = TakeComponent(hook, 2, rest);
  ASSERT_TRUE(hook_again.ok() && *hook_again) << hook_again.status();
  EXPECT_EQ((*hook_again)->root.size(), 1);
  EXPECT_EQ((*hook_again)->sharded.count("factors"), 1);
  ASSERT_EQ((*hook_again)->per_rank.size(), 2);
  EXPECT_EQ((*hook_again)->per_rank.at(1).at("errors").toInt(), 11);
  const auto run_again = TakeComponent(run, 2, rest);
  ASSERT_TRUE(run_again.ok() && *run_again) << run_again.status();
  EXPECT_EQ((*run_again)->root.at("epoch").toInt(), 3);
  EXPECT_EQ((*run_again)->per_rank.at(1).at("rng").toInt(), 21);
  const auto schedule_again = TakeComponent(schedule, 2, rest);
  ASSERT_TRUE(schedule_again.ok() && *schedule_again) << schedule_again.status();
  EXPECT_EQ((*schedule_again)->root.size(), 2);

  ASSERT_EQ(rest.root.size(), 1);
  EXPECT_TRUE(rest.root.contains("extra"));
  EXPECT_TRUE(rest.sharded.empty());
  EXPECT_TRUE(rest.per_rank.at(1).empty());
  EXPECT_FALSE(TakeComponent(hook, 2, rest)->has_value());
  // The state itself has all of it still.
  EXPECT_EQ(state.root.size(), 5);
  EXPECT_EQ(state.per_rank.at(1).size(), 2);
}

// As formats that rank 0 writes alone have them.
TEST(StatefulTest, EntriesPerRankMayBeListsAtTheTopLevel) {
  State rest = {.root = DictOf("rng", c10::List<int64_t>({20, 21}))};
  const auto run = TakeComponent({.name = "run", .top_level_per_rank = {"rng"}}, 2, rest);
  ASSERT_TRUE(run.ok() && *run) << run.status();
  EXPECT_EQ((*run)->per_rank.at(1).at("rng").toInt(), 21);
  EXPECT_TRUE(rest.root.empty());
}

TEST(StatefulTest, TwoComponentsWithOneKeyAreRefused) {
  State state;
  ASSERT_TRUE(InsertComponent({.name = "a"}, {}, state).ok());
  const absl::Status again = InsertComponent({.name = "a"}, {}, state);
  EXPECT_EQ(again.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(again.message(), "'a'")) << again;
}

TEST(StatefulTest, EntriesThatAreNotWhatTheyMustBeAreNamed) {
  const Component run = {.name = "run", .top_level_per_rank = {"rng"}};
  for (const auto& bad : std::vector<c10::IValue>{1, c10::List<int64_t>({1})}) {
    State rest = {.root = DictOf("rng", bad)};
    const absl::Status status = TakeComponent(run, 2, rest).status();
    EXPECT_TRUE(absl::StrContains(status.message(), "'rng' is not a list of 2 states")) << status;
  }
  State no_dict = {.root = DictOf("hook", 1)};
  EXPECT_TRUE(absl::StrContains(TakeComponent({.name = "hook"}, 2, no_dict).status().message(),
                                "'hook' is not a dict"));
  State numbers = {.per_rank = {{0, DictOf("hook", 1)}, {1, DictOf("hook", 2)}}};
  EXPECT_TRUE(absl::StrContains(TakeComponent({.name = "hook"}, 2, numbers).status().message(),
                                "'per_rank/hook' is not a list of dicts"));
  State one = {.per_rank = {{1, DictOf("hook", NewTree())}}};
  EXPECT_TRUE(absl::StrContains(TakeComponent({.name = "hook"}, 2, one).status().message(),
                                "'per_rank/hook' is not a list of 2 states"));
}

// A rank that has read its own entries only.
TEST(StatefulTest, TheReadersOwnEntriesWillDo) {
  const Component component = {.name = "hook", .top_level_per_rank = {"rng"}};
  const auto own = [](int rank) {
    Dict mine = DictOf("hook", NewTree());
    mine.insert("rng", 7);
    return State{.per_rank = {{rank, mine}}};
  };
  State mine = own(1), theirs = own(0), all = own(1);
  const auto taken = TakeComponent(component, 2, mine, /*reader=*/1);
  ASSERT_TRUE(taken.ok() && *taken) << taken.status();
  EXPECT_EQ((*taken)->per_rank.at(1).at("rng").toInt(), 7);
  EXPECT_FALSE(TakeComponent(component, 2, theirs, /*reader=*/1).ok());
  EXPECT_FALSE(TakeComponent(component, 2, all).ok());
}

TEST(StatefulTest, CheckTensorSaysWhatDiffers) {
  const at::Tensor like = at::zeros({2, 3});
  EXPECT_TRUE(CheckTensor(DictOf("a", at::ones({2, 3})), "a", like).ok());
  const auto message = [&](const c10::IValue& value) {
    return std::string(CheckTensor(DictOf("a", value), "a", like).message());
  };
  EXPECT_EQ(message(1), "'a' is no tensor");
  EXPECT_EQ(message(at::ones({3, 2})),
            "'a' is Float of shape [3, 2], and here Float of shape [2, 3]");
  EXPECT_EQ(message(at::ones({2, 3}, at::kDouble)),
            "'a' is Double of shape [2, 3], and here Float of shape [2, 3]");
  EXPECT_EQ(CheckTensor(NewTree(), "a", like).message(), "'a' is missing in the checkpoint");
}

TEST(LoadNotesTest, DifferencesAreSaidOnce) {
  LoadNotes notes;
  notes.AddDifference("momentum", 0.5, 0.9);
  notes.AddDifference("momentum", 0.5, 0.5);
  notes.AddDifference("momentum", 0.5, 0.9);  // of another parameter group
  EXPECT_EQ(notes.lines(), std::vector<std::string>{"with momentum 0.5, saved 0.9"});
}

TEST(LoadNotesTest, ConfigurationsTellWhatNoComponentCompares) {
  LoadNotes notes;
  notes.AddConfigured("momentum", "0.5", "0.9");
  notes.AddConfigured("lr", "0.1", "0.10");
  notes.AddConfigured("batch_size", "7", "64");
  notes.AddDifference("momentum", 0.5, 0.9);
  notes.AddDifference("lr", 0.1, 0.1);
  EXPECT_EQ(notes.lines(), (std::vector<std::string>{"with momentum 0.5, saved 0.9",
                                                     "with batch_size 7, saved 64"}));
}

}  // namespace
}  // namespace ddp::checkpoint
