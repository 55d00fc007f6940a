#include "checkpoint/dcp/tree.h"

#include <gtest/gtest.h>

#include <string>
#include <variant>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace ddp::checkpoint::dcp {
namespace {

Entry At(std::vector<Key> path) { return {.name = "x", .path = std::move(path), .value = Item{}}; }

// Dicts as {key: …}, lists as [index: …], values as the number of their entry.
std::string Text(const Tree& tree, size_t id = 0) {
  const TreeNode& node = tree.nodes[id];
  if (node.kind == TreeNode::Kind::kValue) return absl::StrCat(node.entry);
  std::string text = node.kind == TreeNode::Kind::kDict ? "{" : "[";
  for (const auto& [key, next] : node.below) {
    const auto* name = std::get_if<std::string>(&key);
    absl::StrAppend(
        &text, text.size() > 1 ? ", " : "",
        name != nullptr ? absl::StrCat("'", *name, "'") : absl::StrCat(std::get<int64_t>(key)),
        ": ", Text(tree, next));
  }
  return text + (node.kind == TreeNode::Kind::kDict ? "}" : "]");
}

std::string TextOf(const std::vector<Entry>& entries) {
  const absl::StatusOr<Tree> tree = TreeOf(entries);
  return tree.ok() ? Text(*tree) : std::string(tree.status().message());
}

const Key kZero = int64_t{0}, kOne = int64_t{1};

TEST(TreeTest, DictsAndListsAreMadeAgain) {
  EXPECT_EQ(TextOf({}), "{}");
  EXPECT_EQ(TextOf({At({"model", "fc.weight"}), At({"epoch"}), At({"model", "fc.bias"})}),
            "{'model': {'fc.weight': 0, 'fc.bias': 2}, 'epoch': 1}");
  EXPECT_EQ(TextOf({At({"a", kOne, "b"}), At({"a", kZero})}), "{'a': [0: 1, 1: {'b': 0}]}");
  // A list whose element 0 was an empty dict.
  EXPECT_EQ(TextOf({At({"a", kOne})}), "{'a': [1: 0]}");
  EXPECT_EQ(TextOf({At({"a", "0"}), At({"a", "1"})}), "{'a': {'0': 0, '1': 1}}");
}

TEST(TreeTest, AnOptimizersStateHasNumbersAgain) {
  EXPECT_EQ(
      TextOf({At({"o", "state", "0", "step"}), At({"o", "state", "12", "step"}),
              At({"o", "param_groups", kZero, "lr"}), At({"o", "param_groups", kZero, "params"})}),
      "{'o': {'state': {0: {'step': 0}, 12: {'step': 1}}, "
      "'param_groups': [0: {'lr': 2, 'params': 3}]}}");
  EXPECT_EQ(TextOf({At({"o", "param_groups", kZero, "params"})}),
            "{'o': {'state': {}, 'param_groups': [0: {'params': 0}]}}");
  // Names stay names, and so do numbers of what is no optimizer.
  for (absl::string_view name : {"fc.weight", "00", "+1", " 1", ""}) {
    const Key key = std::string(name);
    EXPECT_EQ(TextOf({At({"state", "0", "x"}), At({"state", key, "x"}),
                      At({"param_groups", kZero, "params"})}),
              absl::StrCat("{'state': {'0': {'x': 0}, '", name,
                           "': {'x': 1}}, 'param_groups': [0: {'params': 2}]}"));
  }
  EXPECT_EQ(TextOf({At({"state", "0"}), At({"param_groups", kZero, "lr"})}),
            "{'state': {'0': 0}, 'param_groups': [0: {'lr': 1}]}");
  EXPECT_EQ(TextOf({At({"state", "0"}), At({"param_groups"})}),
            "{'state': {'0': 0}, 'param_groups': 1}");
}

TEST(TreeTest, PathsThatContradictEachOtherAreRefused) {
  const auto refused = [](const std::vector<Entry>& entries, absl::string_view what) {
    const absl::Status status = TreeOf(entries).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), what)) << status;
  };
  refused({At({"a"}), At({"a", "b"})}, "stands");
  refused({At({"a", "b"}), At({"a"})}, "stands");
  refused({At({"a"}), At({"a"})}, "stands");
  refused({At({"a", kZero}), At({"a", "b"})}, "stands");
  refused({At({kZero})}, "stands");
  refused({At({"a", int64_t{1} << 60})}, "lack most");
  std::vector<Entry> many;
  for (int i = 0; i < 100; ++i) many.push_back(At({absl::StrCat(i), int64_t{20000}}));
  refused(many, "lack most");
}

}  // namespace
}  // namespace ddp::checkpoint::dcp
