// The place of a part in a nested value: cameras[2].rotation, losses["l1"].
//
//   TreePath root;
//   TreePath second(root, TreeStep{.index = 2});
//   TreePath rotation(second, TreeStep{.name = "rotation"});
//   rotation.Text("cameras");  // "cameras[2].rotation"
//
// A path is a list of stack objects, each of which points to its parent: a step costs a few stores,
// and text is made on request only.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

namespace ddp {

// A named member, or an element by index.
struct TreeStep {
  std::string_view name = {};
  size_t index = 0;
};

// Immutable. Its parent, and the name or key, must outlive it.
class TreePath {
 public:
  // The path of the whole value.
  TreePath() = default;
  TreePath(const TreePath& parent, const TreeStep& step)
      : parent_(&parent),
        depth_(parent.depth_ + 1),
        kind_(step.name.data() == nullptr ? Kind::kIndex : Kind::kName),
        text_(step.name),
        number_(static_cast<int64_t>(step.index)) {}

  // The path of the value of `key` in a map.
  template <typename Key>
  static TreePath OfKey(const TreePath& parent, const Key& key) {
    if constexpr (std::is_convertible_v<const Key&, std::string_view>) {
      return TreePath(parent, Kind::kTextKey, key, 0);
    } else if constexpr (std::is_integral_v<Key> || std::is_enum_v<Key>) {
      return TreePath(parent, Kind::kIndex, {}, static_cast<int64_t>(key));
    } else {
      return TreePath(parent, Kind::kOtherKey, {}, 0);
    }
  }

  TreePath(const TreePath&) = delete;
  TreePath& operator=(const TreePath&) = delete;

  // Number of steps.
  int depth() const { return depth_; }

  // `root` is the name of the whole value. Keys that are neither text nor integers are "[…]".
  std::string Text(std::string_view root = "value") const;

 private:
  enum class Kind : uint8_t { kRoot, kName, kIndex, kTextKey, kOtherKey };

  TreePath(const TreePath& parent, Kind kind, std::string_view text, int64_t number)
      : parent_(&parent), depth_(parent.depth_ + 1), kind_(kind), text_(text), number_(number) {}

  const TreePath* parent_ = nullptr;
  int depth_ = 0;
  Kind kind_ = Kind::kRoot;
  std::string_view text_;
  int64_t number_ = 0;
};

inline std::string TreePath::Text(std::string_view root) const {
  if (parent_ == nullptr) return std::string(root);
  std::string text = parent_->Text(root);
  switch (kind_) {
    case Kind::kRoot:
      break;
    case Kind::kName:
      text.append(".").append(text_);
      break;
    case Kind::kIndex:
      text.append("[").append(std::to_string(number_)).append("]");
      break;
    case Kind::kTextKey:
      text.append("[\"").append(text_).append("\"]");
      break;
    case Kind::kOtherKey:
      text.append("[…]");
      break;
  }
  return text;
}

}  // namespace ddp
