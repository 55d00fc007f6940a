#include "checkpoint/dcp/tree.h"

#include <algorithm>
#include <string>
#include <variant>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ddp::checkpoint::dcp {
namespace {

// Elements of lists that are in no entry, over the whole tree. Python leaves out empty dicts.
constexpr int64_t kMostMissing = int64_t{1} << 20;

class Builder {
 public:
  absl::StatusOr<Tree> Run(const std::vector<Entry>& entries) {
    tree_.nodes.emplace_back();
    places_.emplace_back();
    for (size_t i = 0; i < entries.size(); ++i) {
      if (!Add(entries[i], i)) {
        return absl::DataLossError(absl::StrCat("has a value '", entries[i].name,
                                                "' where another value or container stands"));
      }
    }
    int64_t missing = 0;
    for (TreeNode& node : tree_.nodes) {
      if (node.kind != TreeNode::Kind::kList) continue;
      std::sort(node.below.begin(), node.below.end());
      const int64_t last = std::get<int64_t>(node.below.back().first);
      const auto there = static_cast<int64_t>(node.below.size());
      missing += std::min(last - (there - 1), kMostMissing + 1);
      if (missing > kMostMissing) {
        return absl::DataLossError("has lists that lack most of their elements");
      }
    }
    const size_t count = tree_.nodes.size();
    for (size_t i = 0; i < count; ++i) {
      if (IsOptimizer(i)) RestoreState(i);
    }
    return std::move(tree_);
  }

 private:
  using Kind = TreeNode::Kind;

  static Kind KindFor(const Key& key) {
    return std::holds_alternative<std::string>(key) ? Kind::kDict : Kind::kList;
  }

  // False if the path leads through a value, or through a list by name.
  bool Add(const Entry& entry, size_t number) {
    size_t at = 0;
    for (size_t i = 0; i < entry.path.size(); ++i) {
      const bool is_last = i + 1 == entry.path.size();
      if (tree_.nodes[at].kind != KindFor(entry.path[i])) return false;
      const auto [place, fresh] = places_[at].emplace(entry.path[i], tree_.nodes.size());
      const size_t next = place->second;
      if (fresh) {
        tree_.nodes[at].below.emplace_back(entry.path[i], next);
        tree_.nodes.push_back({.kind = is_last ? Kind::kValue : KindFor(entry.path[i + 1])});
        places_.emplace_back();
      } else if (is_last) {
        return false;
      }
      at = next;
    }
    tree_.nodes[at].entry = number;
    return true;
  }

  // The node at this key; null if there is none.
  const TreeNode* Find(size_t node, const char* name) const {
    const auto found = places_[node].find(Key(std::string(name)));
    return found == places_[node].end() ? nullptr : &tree_.nodes[found->second];
  }

  bool IsOptimizer(size_t node) const {
    if (tree_.nodes[node].kind != Kind::kDict) return false;
    const TreeNode* groups = Find(node, "param_groups");
    return groups != nullptr && groups->kind == Kind::kList &&
           std::all_of(groups->below.begin(), groups->below.end(), [this](const auto& group) {
             return tree_.nodes[group.second].kind == Kind::kDict &&
                    Find(group.second, "params") != nullptr;
           });
  }

  void RestoreState(size_t optimizer) {
    const auto state = places_[optimizer].find(Key(std::string("state")));
    if (state == places_[optimizer].end()) {
      auto& below = tree_.nodes[optimizer].below;
      below.emplace(below.begin(), std::string("state"), tree_.nodes.size());
      tree_.nodes.emplace_back();
      places_.emplace_back();
      return;
    }
    TreeNode& node = tree_.nodes[state->second];
    std::vector<std::pair<Key, size_t>> numbered;
    for (const auto& [key, next] : node.below) {
      int64_t number = 0;
      const auto* name = std::get_if<std::string>(&key);
      if (name == nullptr || !absl::SimpleAtoi(*name, &number) || absl::StrCat(number) != *name) {
        return;
      }
      numbered.emplace_back(number, next);
    }
    node.below = std::move(numbered);
  }

  Tree tree_;
  std::vector<std::map<Key, size_t>> places_;  // of each node, by key
};

}  // namespace

absl::StatusOr<Tree> TreeOf(const std::vector<Entry>& entries) { return Builder().Run(entries); }

}  // namespace ddp::checkpoint::dcp
