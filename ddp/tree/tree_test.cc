#include "ddp/tree/tree.h"

#include <complex>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <variant>
#include <vector>

#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "ddp/inputs.h"
#include "gtest/gtest.h"

namespace render {

struct Cameras {
  at::Tensor rotation;
  std::vector<std::string> names;
};
constexpr auto FieldsOf(const Cameras&) {
  return ddp::Fields(ddp::Field("rotation", &Cameras::rotation),
                     ddp::Field("names", &Cameras::names));
}

struct Joint {
  at::Tensor pose;
  std::vector<Joint> children;
};
constexpr auto FieldsOf(const Joint&) {
  return ddp::Fields(ddp::Field("pose", &Joint::pose), ddp::Field("children", &Joint::children));
}

// It has no FieldsOf of its own: the inherited one would lose `focal`.
struct Lens : Cameras {
  at::Tensor focal;
};
struct Zoom : Cameras {
  double factor = 1;
};
constexpr auto FieldsOf(const Zoom&) {
  return ddp::Fields(ddp::Field("rotation", &Zoom::rotation), ddp::Field("factor", &Zoom::factor));
}

class Hidden {
 public:
  explicit Hidden(int value) : value_(value) {}
  friend constexpr auto FieldsOf(const Hidden&) {
    return ddp::Fields(ddp::Field("value", &Hidden::value_));
  }

 private:
  int value_;
};

struct Opaque {
  at::Tensor tensor;
};

}  // namespace render

namespace ddp {
namespace {

enum class Color { kRed, kBlue };

static_assert(Tree<render::Cameras> && Tree<render::Joint> && Tree<render::Zoom>);
static_assert(Tree<render::Hidden>);
static_assert(!Tree<render::Lens> && !Tree<render::Opaque> && !Tree<std::shared_ptr<int>>);
static_assert(!Tree<std::vector<std::pair<int, render::Opaque>>>);
static_assert(Tree<std::map<Color, std::optional<std::variant<std::monostate, std::string>>>>);
static_assert(Tree<std::tuple<bool, c10::IValue, std::vector<bool>, std::complex<float>>>);
static_assert(Tree<std::unordered_map<int64_t, std::array<std::vector<std::byte>, 2>>>);
static_assert(Tree<std::map<int, int, std::greater<int>>> && !Tree<long double>);
static_assert(Tree<c10::complex<c10::Half>> && !Tree<std::complex<long double>>);
static_assert(HoldsTensors<render::Joint>() && HoldsTensors<std::vector<c10::IValue>>());
static_assert(HoldsTensors<std::pair<render::Opaque, at::Tensor>>());
static_assert(!HoldsTensors<std::vector<std::string>>() && !HoldsTensors<render::Opaque>());

// Path and type of each leaf.
struct Recorder {
  void operator()(const at::Tensor&, const TreePath& path) { Add(path, "tensor"); }
  void operator()(std::string_view text, const TreePath& path) { Add(path, text); }
  void operator()(const std::vector<uint8_t>&, const TreePath& path) { Add(path, "bytes"); }
  void operator()(std::monostate, const TreePath& path) { Add(path, "none"); }
  template <TreeNumber T>
  void operator()(const T& number, const TreePath& path) {
    Add(path, std::to_string(static_cast<int>(number)));
  }
  void operator()(const c10::complex<double>&, const TreePath& path) { Add(path, "complex"); }
  void Other(const c10::IValue& value, const TreePath& path) { Add(path, value.tagKind()); }
  void Add(const TreePath& path, std::string_view what) {
    leaves.push_back(path.Text("v").append("=").append(what));
  }
  std::vector<std::string> leaves;
};

template <typename T>
std::vector<std::string> Leaves(const T& value) {
  Recorder recorder;
  VisitTree(value, recorder);
  return recorder.leaves;
}

using Strings = std::vector<std::string>;

TEST(TreeTest, VisitsEveryLeafInOrderWithItsPath) {
  const std::vector<render::Cameras> cameras = {{at::ones({1}), {"left", "right"}}, {{}, {}}};
  EXPECT_EQ(Leaves(cameras), (Strings{"v[0].rotation=tensor", "v[0].names[0]=left",
                                      "v[0].names[1]=right", "v[1].rotation=tensor"}));
  const std::tuple<std::map<std::string, double>, std::map<Color, std::vector<uint8_t>>> tuple = {
      {{"l1", 2.0}, {"l2", 3.0}}, {{Color::kBlue, {1, 2}}}};
  EXPECT_EQ(Leaves(tuple), (Strings{"v[0][\"l1\"]=2", "v[0][\"l2\"]=3", "v[1][1]=bytes"}));
  const std::vector<std::optional<std::variant<std::monostate, bool>>> optionals = {
      std::nullopt, std::monostate(), true};
  EXPECT_EQ(Leaves(optionals), (Strings{"v[1]=none", "v[2]=1"}));
  EXPECT_EQ(Leaves(std::vector<bool>{true, false}), (Strings{"v[0]=1", "v[1]=0"}));
  EXPECT_EQ(Leaves(at::Tensor()), Strings{"v=tensor"});
  const std::map<std::pair<int, int>, int> pairs = {{{1, 2}, 3}};
  EXPECT_EQ(Leaves(pairs), Strings{"v[…]=3"});
  EXPECT_EQ(Leaves(std::vector{render::Hidden(5)}), Strings{"v[0].value=5"});
}

TEST(TreeTest, AStructMayContainItself) {
  const render::Joint tree = {at::ones({1}), {{at::ones({2}), {{at::ones({3}), {}}}}}};
  EXPECT_EQ(Leaves(tree), (Strings{"v.pose=tensor", "v.children[0].pose=tensor",
                                   "v.children[0].children[0].pose=tensor"}));
}

c10::IValue SomeIValue() {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("list", c10::List<at::Tensor>({at::ones({1}), at::ones({2})}));
  dict.insert("tuple", c10::ivalue::Tuple::create({at::ones({3}), int64_t{4}, "text", true}));
  dict.insert("none", c10::IValue());
  dict.insert("other", c10::IValue(c10::Device(c10::kCPU)));
  return dict;
}

TEST(TreeTest, VisitsWhatAnIValueHolds) {
  EXPECT_EQ(
      Leaves(std::pair(SomeIValue(), 1)),
      (Strings{"v[0][\"list\"][0]=tensor", "v[0][\"list\"][1]=tensor", "v[0][\"tuple\"][0]=tensor",
               "v[0][\"tuple\"][1]=4", "v[0][\"tuple\"][2]=text", "v[0][\"tuple\"][3]=1",
               "v[0][\"none\"]=none", "v[0][\"other\"]=Device", "v[1]=1"}));
}

TEST(TreeTest, CollectsDefinedTensorsInOrder) {
  std::vector<at::Tensor> tensors;
  CollectTensors(SomeIValue(), tensors);
  ASSERT_EQ(tensors.size(), 3);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(tensors[i].numel(), i + 1);
  CollectTensors(render::Cameras{{}, {"x"}}, tensors);
  EXPECT_EQ(tensors.size(), 3);
}

TEST(TreeTest, AVisitorMayChangeLeaves) {
  std::tuple<std::vector<bool>, std::map<std::string, int>, std::variant<int, double>> value = {
      {true, false}, {{"a", 1}}, 2.5};
  VisitTree(value, [](auto& leaf, const TreePath&) {
    using T = std::remove_reference_t<decltype(leaf)>;
    if constexpr (std::is_same_v<T, bool>) {
      leaf = !leaf;
    } else {
      leaf += 1;
    }
  });
  EXPECT_EQ(std::get<0>(value), (std::vector<bool>{false, true}));
  EXPECT_EQ(std::get<1>(value)["a"], 2);
  EXPECT_EQ(std::get<double>(std::get<2>(value)), 3.5);
}

struct EnterRecorder {
  template <typename T>
  void operator()(const T&, const TreePath&) {}
  void Enter(TreeNode node, const TreePath&) { counts.push_back(static_cast<int>(node.count)); }
  template <typename K>
  void Key(const K&, const TreePath&) {
    counts.push_back(-1);
  }
  template <typename V>
  void Numbers(const V& numbers, const TreePath&) {
    counts.push_back(100 + static_cast<int>(numbers.size()));
  }
  std::vector<int> counts;
};

TEST(TreeTest, AVisitorMaySeeTheStructure) {
  EnterRecorder recorder;
  const std::tuple<std::map<int, Strings>, std::optional<int>, std::vector<int>,
                   std::variant<int, bool>>
      value = {{{1, {"a"}}, {2, {}}}, {}, {1, 2, 3}, true};
  VisitTree(value, recorder);
  EXPECT_EQ(recorder.counts, (std::vector<int>{4, 2, -1, 1, -1, 0, 0, 103, 1}));
}

// The other device is "meta", which every machine has.
TEST(InputsTest, TensorsOfStructsAndIValuesAreMovedAndTheCallersAreNot) {
  using Value = std::tuple<render::Cameras, c10::IValue, std::shared_ptr<int>>;
  const Value value = {{at::ones({2}), {"x"}}, SomeIValue(), std::make_shared<int>(3)};
  OnDevice<const Value&> moved(value, at::kMeta);
  EXPECT_TRUE(std::get<0>(moved.get()).rotation.is_meta());
  EXPECT_TRUE(std::get<0>(value).rotation.is_cpu());
  std::vector<at::Tensor> there, here;
  CollectTensors(std::get<1>(moved.get()), there);
  CollectTensors(std::get<1>(value), here);
  ASSERT_EQ(there.size(), 3);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(there[i].is_meta());
    EXPECT_TRUE(here[i].is_cpu());
  }
  // The types are the same, and parts that are no tensors are kept.
  const auto dict = std::get<1>(moved.get()).toGenericDict();
  EXPECT_TRUE(dict.at("list").isTensorList());
  EXPECT_EQ(dict.at("tuple").toTupleRef().elements()[1].toInt(), 4);
  EXPECT_TRUE(dict.at("other").isDevice());
  EXPECT_EQ(std::get<2>(moved.get()), std::get<2>(value));
}

TEST(InputsTest, ListsAndDictsWhoseTypeHoldsNoTensorsAreNotCopied) {
  c10::Dict<std::string, std::optional<double>> dict;
  dict.insert("a", 1.5);
  for (const c10::IValue& value : {c10::IValue(c10::List<int64_t>({1, 2})), c10::IValue(dict)}) {
    c10::IValue moved = value;
    MoveToDevice(moved, at::kMeta);
    EXPECT_TRUE(moved.is(value)) << value;
  }
}

// c10 cannot infer the type of such a tuple; names are part of a type and stay.
TEST(InputsTest, TuplesOfIValuesWithUndefinedTensorsAndWithNames) {
  c10::IValue plain = c10::ivalue::Tuple::create({at::ones({2}), at::Tensor()});
  MoveToDevice(plain, at::kMeta);
  EXPECT_TRUE(plain.toTupleRef().elements()[0].toTensor().is_meta());
  EXPECT_FALSE(plain.toTupleRef().elements()[1].toTensor().defined());
  EXPECT_EQ(tree_internal::NamedType(plain.toTupleRef()), nullptr);

  const auto type = c10::TupleType::createNamed("Output", std::vector<std::string>{"logits"},
                                                std::vector<c10::TypePtr>{c10::TensorType::get()});
  c10::IValue named =
      c10::ivalue::Tuple::createNamed(std::vector<c10::IValue>{at::ones({2})}, type);
  MoveToDevice(named, at::kMeta);
  EXPECT_TRUE(named.toTupleRef().elements()[0].toTensor().is_meta());
  EXPECT_EQ(named.toTupleRef().type()->name()->name(), "Output");
}

}  // namespace
}  // namespace ddp
