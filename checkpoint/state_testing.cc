#include "checkpoint/state_testing.h"

#include <ATen/Functions.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace ddp::checkpoint {
namespace {

std::string TensorDifference(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type()) {
    return absl::StrCat("element types ", c10::toString(a.scalar_type()), " and ",
                        c10::toString(b.scalar_type()));
  }
  if (a.sizes() != b.sizes()) return "shapes";
  if (a.layout() != at::kStrided || b.layout() != at::kStrided) return "layouts";
  const at::Tensor x = a.detach().resolve_conj().resolve_neg().contiguous();
  const at::Tensor y = b.detach().resolve_conj().resolve_neg().contiguous();
  const size_t bytes = static_cast<size_t>(x.numel()) * x.element_size();
  const bool equal = bytes == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), bytes) == 0;
  return equal ? "" : "values";
}

}  // namespace

State SampleState() {
  at::Tensor counting = at::arange(0, 24, at::kFloat).reshape({2, 3, 4});
  c10::impl::GenericDict tensors = NewTree();
  for (c10::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
        at::kChar, at::kByte, at::kBool, at::kComplexFloat, at::kComplexDouble, at::kUInt16,
        at::kUInt32, at::kUInt64, at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    tensors.insert(c10::toString(dtype), counting.to(dtype));
  }
  tensors.insert("no dimensions", at::scalar_tensor(0.1, at::kDouble));
  tensors.insert("no elements", at::empty({0, 5}));
  tensors.insert("transposed", counting.transpose(0, 2));
  tensors.insert("every other", counting.select(2, 1));
  tensors.insert("shared", counting);
  tensors.insert("expanded", at::ones({1}).expand({4}));
  at::Tensor special = at::zeros({4});
  special[0] = std::numeric_limits<float>::quiet_NaN();
  special[1] = std::numeric_limits<float>::infinity();
  special[2] = -0.0;
  special[3] = std::numeric_limits<float>::denorm_min();
  tensors.insert("special", special);
  at::Tensor parameter = at::ones({2});
  parameter.set_requires_grad(true);
  tensors.insert("with autograd", parameter);

  c10::impl::GenericDict by_number(c10::IntType::get(), c10::AnyType::get());
  by_number.insert(int64_t{0}, "zero");
  by_number.insert(int64_t{-7}, "minus seven");
  c10::impl::GenericList list(c10::AnyType::get());
  for (int64_t value : {int64_t{0}, int64_t{255}, int64_t{256}, int64_t{-1}, int64_t{65536},
                        int64_t{2147483647}, int64_t{-2147483648}, int64_t{2147483648},
                        std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()}) {
    list.push_back(value);
  }

  State state;
  state.root.insert("tensors", tensors);
  state.root.insert("integers", list);
  state.root.insert("typed list", c10::List<int64_t>({1, 2, 3}));
  state.root.insert("tuple", c10::ivalue::Tuple::create({c10::IValue(0.9), c10::IValue(true)}));
  state.root.insert("by number", by_number);
  state.root.insert("none", c10::IValue());
  state.root.insert("false", false);
  state.root.insert("double", -1.5e-310);
  state.root.insert("infinity", -std::numeric_limits<double>::infinity());
  state.root.insert("text", "Grüße, 世界 🎉\n\"quoted\"");
  state.root.insert("empty text", "");
  state.root.insert("empty dict", NewTree());
  state.root.insert("empty list", c10::impl::GenericList(c10::AnyType::get()));
  state.root.insert("empty tuple", c10::ivalue::Tuple::create(std::vector<c10::IValue>()));
  return state;
}

std::string Difference(const c10::IValue& a, const c10::IValue& b, const std::string& path) {
  const auto differs = [&](absl::string_view how) { return absl::StrCat(path, ": ", how); };
  if (a.isGenericDict() && b.isGenericDict()) {
    const c10::impl::GenericDict x = a.toGenericDict();
    const c10::impl::GenericDict y = b.toGenericDict();
    if (x.size() != y.size()) return differs("sizes");
    auto other = y.begin();
    for (const auto& entry : x) {
      if (entry.key().tagKind() != other->key().tagKind() || entry.key() != other->key()) {
        return differs("keys, or their order");
      }
      std::string below =
          Difference(entry.value(), other->value(), absl::StrCat(path, "/", KeyText(entry.key())));
      if (!below.empty()) return below;
      ++other;
    }
    return "";
  }
  if ((a.isList() && b.isList()) || (a.isTuple() && b.isTuple())) {
    const std::vector<c10::IValue> x =
        a.isList() ? a.toListRef().vec() : a.toTupleRef().elements().vec();
    const std::vector<c10::IValue> y =
        b.isList() ? b.toListRef().vec() : b.toTupleRef().elements().vec();
    if (x.size() != y.size()) return differs("sizes");
    for (size_t i = 0; i < x.size(); ++i) {
      std::string below = Difference(x[i], y[i], absl::StrCat(path, "/", i));
      if (!below.empty()) return below;
    }
    return "";
  }
  if (a.tagKind() != b.tagKind()) {
    return differs(absl::StrCat("types ", a.tagKind(), " and ", b.tagKind()));
  }
  if (a.isTensor()) {
    const std::string how = TensorDifference(a.toTensor(), b.toTensor());
    return how.empty() ? "" : differs(how);
  }
  return a == b ? "" : differs("values");
}

BroadcastBytes BroadcastOver(const Coordinator& ranks) {
  return [&ranks](void* data, size_t size, int from) {
    const std::string mine(static_cast<const char*>(data), ranks.rank() == from ? size : 0);
    absl::StatusOr<std::vector<std::string>> all = ranks.AllGather(mine);
    if (all.ok()) std::memcpy(data, (*all)[static_cast<size_t>(from)].data(), size);
    return all.status();
  };
}

}  // namespace ddp::checkpoint
