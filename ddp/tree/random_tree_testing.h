// For tests: nested values from a seed, and an exact comparison of any two.
//
//   RandomTree value = MakeRandomTree(seed);
//   EXPECT_EQ(Fingerprint(copy), Fingerprint(value));
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "ddp/tree/tree.h"

namespace ddp::testing_trees {

enum class Color : uint16_t { kRed, kGreen = 40000 };

// A struct that contains itself and one of everything.
struct RandomTree {
  at::Tensor tensor;
  std::vector<RandomTree> children;
  std::map<std::string, std::vector<at::Tensor>> tensors;
  std::unordered_map<int64_t, std::string> texts;
  std::map<std::pair<int, bool>, Color> colors;
  std::vector<std::optional<std::variant<std::monostate, double, std::vector<uint8_t>, at::Tensor>>>
      choices;
  std::tuple<std::vector<bool>, std::vector<float>, std::vector<c10::complex<double>>,
             std::vector<std::vector<int16_t>>>
      numbers;
  std::array<std::pair<std::vector<std::byte>, c10::BFloat16>, 2> pairs;
  c10::IValue ivalue;
};
constexpr auto FieldsOf(const RandomTree&) {
  return Fields(Field("tensor", &RandomTree::tensor), Field("children", &RandomTree::children),
                Field("tensors", &RandomTree::tensors), Field("texts", &RandomTree::texts),
                Field("colors", &RandomTree::colors), Field("choices", &RandomTree::choices),
                Field("numbers", &RandomTree::numbers), Field("pairs", &RandomTree::pairs),
                Field("ivalue", &RandomTree::ivalue));
}

// Makes random values. Tensors have every dtype and shape that the format has; some are undefined,
// without elements, without dimensions, or not contiguous. The bytes of floating-point tensors are
// random: NaNs of all kinds, -0.0.
class Random {
 public:
  explicit Random(uint64_t seed) : generator_(seed) {}

  int64_t Below(int64_t n) { return static_cast<int64_t>(generator_() % n); }

  std::string Text() {
    std::string text(Below(6), ' ');
    for (char& c : text) c = static_cast<char>(Below(256));
    return text;
  }

  at::Tensor Tensor() {
    static constexpr c10::ScalarType kTypes[] = {
        at::kByte,        at::kChar,         at::kShort,         at::kInt,
        at::kLong,        at::kHalf,         at::kFloat,         at::kDouble,
        at::kBool,        at::kBFloat16,     at::kUInt16,        at::kUInt64,
        at::kComplexHalf, at::kComplexFloat, at::kComplexDouble, at::kFloat8_e4m3fn};
    if (Below(12) == 0) return at::Tensor();
    std::vector<int64_t> sizes(Below(4));
    for (int64_t& size : sizes) size = Below(5);
    const c10::ScalarType type = kTypes[Below(std::size(kTypes))];
    at::Tensor tensor = at::empty(sizes, type);
    auto* bytes = static_cast<uint8_t*>(tensor.data_ptr());
    for (size_t i = 0; i < tensor.nbytes(); ++i) {
      bytes[i] = static_cast<uint8_t>(Below(type == at::kBool ? 2 : 256));
    }
    if (sizes.size() > 1 && Below(2) == 0) tensor = tensor.transpose(0, 1);
    if (tensor.dim() > 0 && tensor.size(0) > 2 && Below(2) == 0) tensor = tensor.narrow(0, 1, 1);
    return tensor;
  }

  c10::IValue IValue(int depth) {
    switch (Below(depth > 0 ? 10 : 7)) {
      case 0:
        return {};
      case 1:
        return Tensor();
      case 2:
        return Below(1000) - 500;
      case 3:
        return std::numeric_limits<double>::infinity() * static_cast<double>(1 - Below(2) * 2);
      case 4:
        return Below(2) == 0;
      case 5:
        return Text();
      case 6:
        return c10::complex<double>(1.5, -0.0);
      case 7: {
        if (Below(2) == 0) return c10::List<int64_t>({Below(9), Below(9)});
        c10::impl::GenericList list(c10::AnyType::get());
        for (int64_t i = Below(4); i > 0; --i) list.push_back(IValue(depth - 1));
        return list;
      }
      case 8: {
        std::vector<c10::IValue> elements;
        for (int64_t i = Below(4); i > 0; --i) elements.push_back(IValue(depth - 1));
        return c10::ivalue::Tuple::create(std::move(elements));
      }
      default: {
        c10::impl::GenericDict dict(c10::IntType::get(), c10::AnyType::get());
        for (int64_t i = Below(4); i > 0; --i) dict.insert_or_assign(Below(99), IValue(depth - 1));
        return dict;
      }
    }
  }

  RandomTree Tree(int depth) {
    RandomTree tree;
    tree.tensor = Tensor();
    if (depth > 0) {
      for (int64_t i = Below(3); i > 0; --i) tree.children.push_back(Tree(depth - 1));
    }
    for (int64_t i = Below(3); i > 0; --i) {
      auto& tensors = tree.tensors[Text()];
      for (int64_t j = Below(3); j > 0; --j) tensors.push_back(Tensor());
    }
    for (int64_t i = Below(4); i > 0; --i) tree.texts[Below(100) - 50] = Text();
    for (int64_t i = Below(4); i > 0; --i) {
      tree.colors[{static_cast<int>(Below(9)), Below(2) == 0}] = Color::kGreen;
    }
    for (int64_t i = Below(6); i > 0; --i) {
      auto& choice = tree.choices.emplace_back();
      if (Below(4) == 0) continue;
      choice.emplace();
      if (const int64_t kind = Below(4); kind == 1) {
        *choice = -0.0;
      } else if (kind == 2) {
        *choice = std::vector<uint8_t>(Below(5), static_cast<uint8_t>(Below(256)));
      } else if (kind == 3) {
        *choice = Tensor();
      }
    }
    auto& [bools, floats, complexes, shorts] = tree.numbers;
    for (int64_t i = Below(5); i > 0; --i) bools.push_back(Below(2) == 0);
    floats.assign(Below(5), std::numeric_limits<float>::quiet_NaN());
    complexes.assign(Below(3), {2.5, static_cast<double>(Below(9))});
    for (int64_t i = Below(3); i > 0; --i) {
      shorts.emplace_back(Below(4), static_cast<int16_t>(-Below(3000)));
    }
    tree.pairs[1] = {std::vector<std::byte>(Below(4), std::byte{7}),
                     c10::BFloat16(static_cast<float>(Below(5)))};
    tree.ivalue = IValue(2);
    return tree;
  }

 private:
  std::mt19937_64 generator_;
};

inline RandomTree MakeRandomTree(uint64_t seed) { return Random(seed).Tree(2); }

// Converts a value to text. Texts are equal if structure, types of IValues and bits are equal;
// strides do not matter. Independent of the codec.
class Fingerprinter {
 public:
  void operator()(const at::Tensor& tensor, const TreePath& path) {
    if (!tensor.defined()) return Add(path, "undefined", "");
    const at::Tensor flat = tensor.contiguous();
    Add(path, absl::StrCat(c10::toString(tensor.scalar_type()), c10::str(tensor.sizes())),
        {static_cast<const char*>(flat.data_ptr()), flat.nbytes()});
  }
  void operator()(std::string_view value, const TreePath& path) { Add(path, "text", value); }
  void operator()(const std::vector<uint8_t>& value, const TreePath& path) {
    Add(path, "bytes", {reinterpret_cast<const char*>(value.data()), value.size()});
  }
  void operator()(const std::vector<std::byte>& value, const TreePath& path) {
    Add(path, "bytes", {reinterpret_cast<const char*>(value.data()), value.size()});
  }
  void operator()(std::monostate, const TreePath& path) { Add(path, "none", ""); }
  template <TreeNumber T>
  void operator()(const T& number, const TreePath& path) {
    Add(path, absl::StrCat("number of ", sizeof(T)),
        {reinterpret_cast<const char*>(&number), sizeof(T)});
  }
  void Enter(TreeNode node, const TreePath& path) {
    Add(path, "node", absl::StrCat(static_cast<int>(node.kind), ":", node.count));
  }
  template <typename K>
  void Key(const K& key, const TreePath& path) {
    VisitTree(key, *this, path);
  }
  template <typename T>
  void Other(const T&, const TreePath& path) {
    Add(path, "other", "");
  }
  // The lines are sorted, since an unordered_map has no order.
  std::string Finish() {
    std::sort(lines_.begin(), lines_.end());
    std::string text;
    for (const std::string& line : lines_) absl::StrAppend(&text, line);
    return text;
  }

 private:
  void Add(const TreePath& path, std::string_view what, std::string_view value) {
    std::string line = absl::StrCat(path.Text(), " ", what, " ");
    for (const char c : value) absl::StrAppend(&line, static_cast<int>(c), ",");
    lines_.push_back(line.append("\n"));
  }
  std::vector<std::string> lines_;
};

template <typename T>
std::string Fingerprint(const T& value) {
  Fingerprinter fingerprinter;
  VisitTree(value, fingerprinter);
  return fingerprinter.Finish();
}

}  // namespace ddp::testing_trees
