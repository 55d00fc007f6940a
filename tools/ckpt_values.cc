#include "tools/ckpt_values.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue_inl.h>
#include <fnmatch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/status.h"
#include "checkpoint/consolidate.h"
#include "checkpoint/parts.h"

namespace ddp::tools::ckpt {
namespace {

using checkpoint::KeyText;
using checkpoint::KindText;

std::string Join(const std::string& path, absl::string_view name) {
  return path.empty() ? std::string(name) : absl::StrCat(path, "/", name);
}

std::vector<c10::IValue> ItemsOf(const c10::IValue& value) {
  return value.isTuple() ? value.toTupleRef().elements().vec() : value.toListRef().vec();
}

std::string ValueText(const c10::IValue& value) {
  if (value.isInt()) return absl::StrCat(value.toInt());
  if (value.isDouble()) return absl::StrFormat("%.17g", value.toDouble());
  if (value.isBool()) return value.toBool() ? "True" : "False";
  return value.tagKind();
}

// At most about 60 bytes of `text` in quotes, with what is at `place` in it and a little of what is
// before that.
std::string Excerpt(absl::string_view text, size_t place) {
  constexpr size_t kMost = 60, kBefore = 20;
  const auto is_within_character = [&](size_t at) {
    return at < text.size() && (static_cast<uint8_t>(text[at]) & 0xc0) == 0x80;
  };
  size_t begin = text.size() <= kMost || place <= kBefore ? 0 : place - kBefore;
  while (begin > 0 && is_within_character(begin)) --begin;
  size_t end = std::min(text.size(), begin + kMost);
  while (end > begin && is_within_character(end)) --end;
  return absl::StrCat(begin > 0 ? "'…" : "'", text.substr(begin, end - begin),
                      end < text.size() ? "…'" : "'");
}

// Where two texts differ: "'a' and 'b'", of several lines "line 3: 'a' and 'b'".
std::string TextsDiffer(absl::string_view a, absl::string_view b) {
  const std::vector<absl::string_view> x = absl::StrSplit(a, '\n'), y = absl::StrSplit(b, '\n');
  size_t line = 0;
  while (line < x.size() && line < y.size() && x[line] == y[line]) ++line;
  const absl::string_view first = line < x.size() ? x[line] : "";
  const absl::string_view second = line < y.size() ? y[line] : "";
  const size_t place =
      std::mismatch(first.begin(), first.end(), second.begin(), second.end()).first - first.begin();
  const auto excerpt = [&](const auto& lines, absl::string_view text) {
    return line < lines.size() ? Excerpt(text, place) : "no such line";
  };
  return absl::StrCat(x.size() > 1 || y.size() > 1 ? absl::StrCat("line ", line + 1, ": ") : "",
                      excerpt(x, first), " and ", excerpt(y, second));
}

// `value` with what `map` makes of each tensor. Other values are shared.
c10::IValue MapTensors(
    const c10::IValue& value, const std::string& path,
    const std::function<at::Tensor(const std::string& path, const at::Tensor&)>& map) {
  if (value.isTensor()) return map(path, value.toTensor());
  if (value.isGenericDict()) {
    c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
    for (const auto& entry : value.toGenericDict()) {
      dict.insert(entry.key(), MapTensors(entry.value(), Join(path, KeyText(entry.key())), map));
    }
    return dict;
  }
  if (!value.isTuple() && !value.isList()) return value;
  std::vector<c10::IValue> items;
  for (const c10::IValue& item : ItemsOf(value)) {
    items.push_back(MapTensors(item, Join(path, absl::StrCat(items.size())), map));
  }
  if (value.isTuple()) return c10::ivalue::Tuple::create(std::move(items));
  c10::impl::GenericList list(c10::AnyType::get());
  for (c10::IValue& item : items) list.push_back(std::move(item));
  return list;
}

// Of dense tensors of one dtype and shape.
bool SameBits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.resolve_conj().resolve_neg().contiguous();
  const at::Tensor y = b.resolve_conj().resolve_neg().contiguous();
  return x.numel() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

// Makes each tensor once of those that are the same elements in memory, as tied weights are.
class Once {
 public:
  const at::Tensor& Of(const at::Tensor& tensor, const std::function<at::Tensor()>& make) {
    const Place place(tensor.const_data_ptr(), tensor.scalar_type(), tensor.sizes().vec(),
                      tensor.strides().vec(), tensor.is_neg());
    at::Tensor& made = made_[place];
    if (!made.defined()) made = make();
    return made;
  }

 private:
  // The last: whether the elements are those in memory with the other sign.
  using Place =
      std::tuple<const void*, at::ScalarType, std::vector<int64_t>, std::vector<int64_t>, bool>;
  std::map<Place, at::Tensor> made_;
};

// Calls `visit` for each value that is no dict, list or tuple.
void VisitLeaves(const c10::IValue& value, const std::string& path,
                 const std::function<void(const std::string&, const c10::IValue&)>& visit) {
  if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) {
      VisitLeaves(entry.value(), Join(path, KeyText(entry.key())), visit);
    }
  } else if (value.isTuple() || value.isList()) {
    size_t index = 0;
    for (const c10::IValue& item : ItemsOf(value)) {
      VisitLeaves(item, Join(path, absl::StrCat(index++)), visit);
    }
  } else {
    visit(path, value);
  }
}

// Of an optimizer's state, as Optimizer.state_dict() has it.
constexpr char kStates[] = "state";
constexpr char kGroups[] = "param_groups";
constexpr char kParameters[] = "params";
constexpr char kParameterNames[] = "param_names";

// None if `value` is no dict, or has no such key.
c10::IValue EntryOf(const c10::IValue& value, const char* key) {
  if (!value.isGenericDict()) return {};
  const c10::impl::GenericDict dict = value.toGenericDict();
  const auto found = dict.find(key);
  return found == dict.end() ? c10::IValue() : found->value();
}

// By number, the parameters of the optimizer's state `numbered`: what it says itself or, by their
// places in the groups, what `named` calls them. Empty: it has no numbers, or the other no names.
std::map<int64_t, std::string> NamesOf(const c10::IValue& numbered, const c10::IValue& named) {
  std::map<int64_t, std::string> names;
  const c10::IValue all = EntryOf(numbered, kGroups), others = EntryOf(named, kGroups);
  if (!EntryOf(numbered, kStates).isGenericDict() || !all.isList() || !others.isList()) return {};
  const std::vector<c10::IValue> groups = ItemsOf(all), other_groups = ItemsOf(others);
  if (groups.size() != other_groups.size()) return {};
  for (size_t g = 0; g < groups.size(); ++g) {
    const c10::IValue numbers = EntryOf(groups[g], kParameters);
    const c10::IValue texts = EntryOf(other_groups[g], kParameters);
    if (!numbers.isList() || !texts.isList()) return {};
    const std::vector<c10::IValue> keys = ItemsOf(numbers), other_keys = ItemsOf(texts);
    const c10::IValue given = EntryOf(groups[g], kParameterNames);
    const std::vector<c10::IValue> own = given.isList() ? ItemsOf(given) : other_keys;
    if (keys.size() != other_keys.size() || keys.size() != own.size()) return {};
    for (size_t i = 0; i < keys.size(); ++i) {
      if (!keys[i].isInt() || !other_keys[i].isString() || !own[i].isString()) return {};
      names.emplace(keys[i].toInt(), own[i].toStringRef());
    }
  }
  return names;
}

// The optimizer's state `numbered` with these names.
c10::IValue WithNames(const c10::IValue& numbered, const std::map<int64_t, std::string>& names) {
  const auto name_of = [&](const c10::IValue& key) -> c10::IValue {
    const auto found = key.isInt() ? names.find(key.toInt()) : names.end();
    if (found == names.end()) return key;
    return c10::IValue(found->second);
  };
  c10::impl::GenericDict states(c10::AnyType::get(), c10::AnyType::get());
  for (const auto& entry : EntryOf(numbered, kStates).toGenericDict()) {
    states.insert_or_assign(name_of(entry.key()), entry.value());
  }
  c10::impl::GenericList groups(c10::AnyType::get());
  for (const c10::IValue& saved : ItemsOf(EntryOf(numbered, kGroups))) {
    c10::impl::GenericDict group = saved.toGenericDict().copy();
    c10::impl::GenericList parameters(c10::AnyType::get());
    for (const c10::IValue& key : ItemsOf(EntryOf(saved, kParameters))) {
      parameters.push_back(name_of(key));
    }
    group.insert_or_assign(kParameters, std::move(parameters));
    (void)group.erase(kParameterNames);
    groups.push_back(std::move(group));
  }
  c10::impl::GenericDict named = numbered.toGenericDict().copy();
  named.insert_or_assign(kStates, std::move(states));
  named.insert_or_assign(kGroups, std::move(groups));
  return named;
}

// Lists over ranks of `root` move to its top level, where `other` has them there.
void MoveToTop(c10::impl::GenericDict root, const c10::impl::GenericDict& other) {
  const c10::IValue lists = EntryOf(root, checkpoint::kPerRankEntries);
  if (!lists.isGenericDict()) return;
  c10::impl::GenericDict kept = checkpoint::NewTree();
  for (const auto& entry : lists.toGenericDict()) {
    const auto there = other.find(entry.key());
    const bool moves =
        there != other.end() && there->value().isList() && !root.contains(entry.key());
    (moves ? root : kept).insert(entry.key(), entry.value());
  }
  if (kept.empty()) {
    (void)root.erase(checkpoint::kPerRankEntries);
  } else {
    root.insert_or_assign(checkpoint::kPerRankEntries, std::move(kept));
  }
}

std::optional<c10::IValue> MatchingBelow(const c10::IValue& value, const std::string& path,
                                         const std::string& pattern) {
  if (!path.empty() && ::fnmatch(pattern.c_str(), path.c_str(), 0) == 0) return value;
  if (!value.isGenericDict()) return std::nullopt;
  c10::impl::GenericDict kept(c10::AnyType::get(), c10::AnyType::get());
  for (const auto& entry : value.toGenericDict()) {
    if (auto below = MatchingBelow(entry.value(), Join(path, KeyText(entry.key())), pattern)) {
      kept.insert(entry.key(), *below);
    }
  }
  if (kept.empty()) return std::nullopt;
  return c10::IValue(kept);
}

// Whether `cast` has the values of `tensor` but for rounding, which changes a number by an eighth
// at most, and for small ones. One that is too large becomes inf, nan or, in some types, the
// largest number.
bool Holds(const at::Tensor& cast, const at::Tensor& tensor) {
  constexpr int64_t kPiece = int64_t{1} << 22;  // of copies in double, which has isfinite
  const at::Tensor from = tensor.reshape({-1}), to = cast.reshape({-1});
  for (int64_t begin = 0; begin < from.numel(); begin += kPiece) {
    const int64_t size = std::min(kPiece, from.numel() - begin);
    const at::Tensor x = from.narrow(0, begin, size).to(at::kDouble).abs();
    const at::Tensor y = to.narrow(0, begin, size).to(at::kDouble).abs();
    const at::Tensor is_held = at::isfinite(y).logical_and(y.ge(0.75 * x));
    if (at::isfinite(x)
            .logical_and(x.ge(1))
            .logical_and(is_held.logical_not())
            .any()
            .item<bool>()) {
      return false;
    }
  }
  return true;
}

}  // namespace

void VisitTensors(const c10::IValue& value, const std::string& path,
                  const std::function<void(const std::string&, const at::Tensor&)>& visit) {
  VisitLeaves(value, path, [&](const std::string& below, const c10::IValue& leaf) {
    if (leaf.isTensor()) visit(below, leaf.toTensor());
  });
}

void MoveRanksIntoRoot(checkpoint::State& state) {
  if (state.per_rank.empty()) return;
  std::vector<c10::impl::GenericDict> by_rank;
  for (const auto& [rank, entries] : state.per_rank) by_rank.push_back(entries);
  const c10::impl::GenericDict by_key =
      checkpoint::ListsOfRanks(by_rank, checkpoint::MissingEntry::kNone).value();
  state.root.insert_or_assign(checkpoint::kPerRankEntries, by_key);
  state.per_rank.clear();
}

void Align(checkpoint::State& a, checkpoint::State& b) {
  MoveToTop(a.root, b.root);
  MoveToTop(b.root, a.root);
  std::vector<std::string> keys;
  for (const auto& entry : a.root) {
    if (entry.key().isString() && b.root.contains(entry.key())) {
      keys.push_back(entry.key().toStringRef());
    }
  }
  for (const std::string& key : keys) {
    const c10::IValue x = a.root.at(key), y = b.root.at(key);
    if (const auto names = NamesOf(x, y); !names.empty()) {
      a.root.insert_or_assign(key, WithNames(x, names));
    } else if (const auto others = NamesOf(y, x); !others.empty()) {
      b.root.insert_or_assign(key, WithNames(y, others));
    }
  }
}

std::string DtypeText(const at::Tensor& tensor) {
  const std::string name = checkpoint::DtypeName(tensor.scalar_type());
  return name.empty() ? c10::toString(tensor.scalar_type()) : name;
}

std::string ShapeOf(const at::Tensor& tensor) {
  const c10::IntArrayRef sizes = tensor.sizes();
  return checkpoint::ShapeText({sizes.data(), sizes.size()});
}

std::string NumberText(double number) {
  return std::isnan(number) ? "nan" : absl::StrFormat("%.6g", number);
}

std::optional<c10::IValue> Matching(const c10::IValue& value, const std::string& pattern) {
  return MatchingBelow(value, "", pattern);
}

c10::IValue Cast(const c10::IValue& value, at::ScalarType dtype,
                 std::vector<std::string>& overflows) {
  Once once;
  return MapTensors(value, "", [&](const std::string& path, const at::Tensor& tensor) {
    if (!tensor.is_floating_point() || tensor.layout() != at::kStrided) return tensor;
    // An optimizer counts its steps in float32, where bfloat16 ends at 256.
    if (tensor.dim() == 0 && absl::EndsWith(path, "/step")) return tensor;
    // A scaler begins with 65536, where float16 ends before.
    if (absl::StartsWith(path, "scaler/")) return tensor;
    return once.Of(tensor, [&] {
      const at::Tensor cast = tensor.to(dtype);
      if (!Holds(cast, tensor)) overflows.push_back(path);
      return cast;
    });
  });
}

absl::Status Mean::Add(const c10::IValue& model, const std::string& where) {
  using Values = std::map<std::string, c10::IValue>;
  std::string twice;
  const auto values_of = [&](const c10::IValue& of) {
    Values values;
    VisitLeaves(of, "model", [&](const std::string& path, const c10::IValue& value) {
      if (!values.emplace(path, value).second) twice = path;
    });
    return values;
  };
  const auto lacks = [](const std::string& one, const std::string& path, const std::string& other) {
    return absl::InvalidArgumentError(
        absl::StrCat(one, " has '", path, "', which ", other, " lacks"));
  };
  const Values values = values_of(model);
  if (!twice.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        where, " has two values of path '", twice,
        "', by keys such as 'a/b', or 1 and '1', and no mean can tell which is which"));
  }
  const Values before = count_ > 0 ? values_of(last_) : values;
  if (count_ == 0) first_ = where;
  for (const auto& [path, value] : before) {
    if (values.count(path) == 0) return lacks(first_, path, where);
  }
  for (const auto& [path, value] : values) {
    const auto other = before.find(path);
    if (other == before.end()) return lacks(where, path, first_);
    DDP_RETURN_IF_ERROR(AddValue(path, value, other->second, where));
  }
  last_ = model;
  ++count_;
  return absl::OkStatus();
}

// `before`: of the last model; of the first one its own.
absl::Status Mean::AddValue(const std::string& path, const c10::IValue& value,
                            const c10::IValue& before, const std::string& where) {
  const auto refuse = [](const auto&... words) {
    return absl::InvalidArgumentError(absl::StrCat(words...));
  };
  if (!value.isTensor() || !before.isTensor()) {
    if (value.isTensor() != before.isTensor()) {
      return refuse("'", path, "' is a tensor in only one of ", first_, " and ", where);
    }
    if (value != before) taken_from_last_.insert(path);
    return absl::OkStatus();
  }
  const at::Tensor tensor = value.toTensor(), other = before.toTensor();
  if (tensor.scalar_type() != other.scalar_type() || tensor.sizes() != other.sizes()) {
    return refuse("'", path, "' is ", DtypeText(other), " ", ShapeOf(other), " in ", first_,
                  " and ", DtypeText(tensor), " ", ShapeOf(tensor), " in ", where);
  }
  if (tensor.layout() != at::kStrided || other.layout() != at::kStrided || tensor.is_quantized()) {
    return refuse("'", path, "' in ", where, " is not dense, and has no mean");
  }
  const bool is_complex = c10::isComplexType(tensor.scalar_type());
  if (!is_complex && !c10::isFloatingType(tensor.scalar_type())) {
    if (!SameBits(tensor, other)) taken_from_last_.insert(path);
    return absl::OkStatus();
  }
  const absl::Status added = CatchStatus("", [&] {
    at::Tensor& sum = sum_[path];
    if (!sum.defined()) {
      sum = at::zeros(tensor.sizes(), is_complex ? at::kComplexDouble : at::kDouble);
    }
    sum.add_(tensor.to(sum.scalar_type()));
  });
  if (added.ok()) return added;
  return refuse("'", path, "' in ", where, " is ", DtypeText(tensor), ", which has no mean here");
}

c10::IValue Mean::Result() const {
  Once once;
  return MapTensors(last_, "model", [&](const std::string& path, const at::Tensor& tensor) {
    const auto sum = sum_.find(path);
    if (sum == sum_.end()) return tensor;
    const at::Tensor mean = sum->second.div(count_).to(tensor.scalar_type());
    // Weights that are tied in the last model may not have been in the others.
    const at::Tensor& one = once.Of(tensor, [&] { return mean; });
    return SameBits(one, mean) ? one : mean;
  });
}

void Comparison::Compare(const c10::IValue& a, const c10::IValue& b, const std::string& path) {
  if (a.isGenericDict() && b.isGenericDict()) return CompareDicts(a, b, path);
  if ((a.isList() && b.isList()) || (a.isTuple() && b.isTuple())) {
    const std::vector<c10::IValue> x = ItemsOf(a), y = ItemsOf(b);
    if (x.size() != y.size()) {
      return Add({path, absl::StrCat(x.size(), " and ", y.size(), " items"), {}});
    }
    for (size_t i = 0; i < x.size(); ++i) Compare(x[i], y[i], Join(path, absl::StrCat(i)));
    return;
  }
  if (a.isTensor() && b.isTensor()) return CompareTensors(a.toTensor(), b.toTensor(), path);
  if (a.tagKind() != b.tagKind()) {
    return Add({path, absl::StrCat(KindText(a), " and ", KindText(b)), {}});
  }
  const bool both_nan = a.isDouble() && std::isnan(a.toDouble()) && std::isnan(b.toDouble());
  if (a == b || both_nan) return;
  if (a.isString()) return Add({path, TextsDiffer(a.toStringRef(), b.toStringRef()), {}});
  Add({path, absl::StrCat(ValueText(a), " and ", ValueText(b)), {}});
}

void Comparison::Add(Difference difference) {
  ++count_;
  const std::optional<double> found = difference.max_abs;
  // NaN counts as the largest.
  if (found.has_value() && (!max_abs_.has_value() || std::isnan(*found) || *found > *max_abs_) &&
      !(max_abs_.has_value() && std::isnan(*max_abs_))) {
    max_abs_ = found;
    largest_ = difference.path;
  }
  if (!first_.has_value()) {
    first_ = std::move(difference);
  } else if (others_.size() < kMostOthers) {
    others_.push_back(std::move(difference.path));
  }
}

void Comparison::CompareDicts(const c10::IValue& a, const c10::IValue& b, const std::string& path) {
  const c10::impl::GenericDict x = a.toGenericDict(), y = b.toGenericDict();
  for (const auto& entry : x) {
    const std::string below = Join(path, KeyText(entry.key()));
    const auto other = y.find(entry.key());
    if (other == y.end()) {
      Add({below, "only in the first", {}});
    } else {
      Compare(entry.value(), other->value(), below);
    }
  }
  for (const auto& entry : y) {
    if (!x.contains(entry.key())) {
      Add({Join(path, KeyText(entry.key())), "only in the second", {}});
    }
  }
}

void Comparison::CompareTensors(const at::Tensor& a, const at::Tensor& b, const std::string& path) {
  if (a.scalar_type() != b.scalar_type()) {
    return Add({path, absl::StrCat("dtypes ", DtypeText(a), " and ", DtypeText(b)), {}});
  }
  if (a.sizes() != b.sizes()) {
    return Add({path, absl::StrCat("shapes ", ShapeOf(a), " and ", ShapeOf(b)), {}});
  }
  if (a.layout() != at::kStrided || b.layout() != at::kStrided) {
    if (!at::equal(a.to_dense(), b.to_dense())) Add({path, "values", {}});
    return;
  }
  if (a.is_quantized() || b.is_quantized()) {
    if (!at::equal(a, b)) Add({path, "values", {}});
    return;
  }
  const at::Tensor x = a.resolve_conj().resolve_neg().contiguous();
  const at::Tensor y = b.resolve_conj().resolve_neg().contiguous();
  if (SameBits(x, y)) return;
  const at::Tensor x_bytes = x.view(-1).view(at::kByte).view({x.numel(), -1});
  const at::Tensor y_bytes = y.view(-1).view(at::kByte).view({y.numel(), -1});
  const at::Tensor where = at::ne(x_bytes, y_bytes).any(1);
  const int64_t differ = where.sum().item<int64_t>();
  std::string what = absl::StrCat(differ, " of ", x.numel(), " elements differ");
  std::optional<double> largest;
  try {
    const auto wide = c10::isComplexType(x.scalar_type()) ? at::kComplexDouble : at::kDouble;
    // Not of equal ones, which may be infinite.
    const auto of_those = [&](const at::Tensor& tensor, at::ScalarType dtype) {
      return tensor.view(-1).to(dtype).masked_select(where);
    };
    largest = (of_those(x, wide) - of_those(y, wide)).abs().max().item<double>();
    // Integers beyond 2^53 that are closer than a double can tell.
    if (*largest == 0 && c10::isIntegralType(x.scalar_type(), /*includeBool=*/false)) {
      largest = (of_those(x, at::kLong) - of_those(y, at::kLong)).abs().max().item<double>();
    }
    absl::StrAppend(&what, ", by at most ", NumberText(*largest));
  } catch (const std::exception&) {
    // A type without arithmetic: the number of elements is all that can be said.
  }
  Add({path, std::move(what), largest});
}

}  // namespace ddp::tools::ckpt
