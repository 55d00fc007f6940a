#include "ddp/tree/format.h"

#include <bit>

#include "ATen/core/jit_type.h"
#include "absl/strings/str_cat.h"

namespace ddp::tree_internal {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

bool IsPlain(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Byte:
    case c10::ScalarType::Char:
    case c10::ScalarType::Short:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
    case c10::ScalarType::UInt16:
    case c10::ScalarType::UInt32:
    case c10::ScalarType::UInt64:
    case c10::ScalarType::Half:
    case c10::ScalarType::BFloat16:
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
    case c10::ScalarType::ComplexHalf:
    case c10::ScalarType::ComplexFloat:
    case c10::ScalarType::ComplexDouble:
    case c10::ScalarType::Bool:
    case c10::ScalarType::Float8_e5m2:
    case c10::ScalarType::Float8_e4m3fn:
    case c10::ScalarType::Float8_e5m2fnuz:
    case c10::ScalarType::Float8_e4m3fnuz:
    case c10::ScalarType::Float8_e8m0fnu:
      return true;
    default:
      return false;
  }
}

bool HasMemory(c10::DeviceType device) {
  switch (device) {
    case c10::DeviceType::CPU:
    case c10::DeviceType::CUDA:
    case c10::DeviceType::HIP:
    case c10::DeviceType::XPU:
    case c10::DeviceType::MPS:
    case c10::DeviceType::HPU:
    case c10::DeviceType::MTIA:
    case c10::DeviceType::PrivateUse1:
      return true;
    default:
      return false;
  }
}

std::string NotPlainReason(const at::Tensor& tensor) {
  if (tensor.layout() != c10::kStrided) return absl::StrCat(c10::str(tensor.layout()), " tensor");
  // Its layout is strided, but it has no sizes.
  if (tensor.is_nested()) return "nested tensor";
  if (tensor.is_quantized()) return "quantized tensor";
  if (!HasMemory(tensor.device().type())) {
    return absl::StrCat("tensor on device ", c10::str(tensor.device()));
  }
  if (!IsPlain(tensor.scalar_type())) {
    return absl::StrCat("tensor of dtype ", c10::toString(tensor.scalar_type()));
  }
  if (!tensor.has_storage() || tensor._is_zerotensor()) return "tensor without memory";
  return "";
}

at::Tensor AsBytes(const at::Tensor& tensor) { return tensor.reshape({-1}).view(at::kByte); }

int TypeCode(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::AnyType:
      return 0;
    case c10::TypeKind::TensorType:
      return 1;
    case c10::TypeKind::IntType:
      return 2;
    case c10::TypeKind::FloatType:
      return 3;
    case c10::TypeKind::BoolType:
      return 4;
    case c10::TypeKind::StringType:
      return 5;
    case c10::TypeKind::ComplexType:
      return 6;
    case c10::TypeKind::NoneType:
      return 7;
    case c10::TypeKind::OptionalType:
      return 8;
    case c10::TypeKind::ListType:
      return 9;
    case c10::TypeKind::DictType:
      return 10;
    case c10::TypeKind::TupleType:
      return 11;
    default:
      return -1;
  }
}

bool Fits(const c10::IValue& value, const c10::Type& type) {
  const auto parts = type.containedTypes();
  switch (TypeCode(type)) {
    case 0:
      return true;
    case 1:
      return value.isTensor();
    case 2:
      return value.isInt();
    case 3:
      return value.isDouble();
    case 4:
      return value.isBool();
    case 5:
      return value.isString();
    case 6:
      return value.isComplexDouble();
    case 7:
      return value.isNone();
    case 8:
      return value.isNone() || Fits(value, *parts[0]);
    case 9:
      return value.isList() && *value.toList().elementType() == *parts[0];
    case 10:
      return value.isGenericDict() && *value.toGenericDict().keyType() == *parts[0] &&
             *value.toGenericDict().valueType() == *parts[1];
    case 11: {
      if (!value.isTuple() || value.toTupleRef().size() != parts.size()) return false;
      for (size_t i = 0; i < parts.size(); ++i) {
        if (!Fits(value.toTupleRef().elements()[i], *parts[i])) return false;
      }
      return true;
    }
    default:
      return false;
  }
}

bool CanBeKey(const c10::IValue& value) {
  return value.isString() || value.isInt() || value.isDouble() || value.isBool() ||
         value.isComplexDouble();
}

bool CanBeKeyType(const c10::Type& type) {
  const int code = TypeCode(type);
  return code >= 0 && code <= 6;
}

}  // namespace ddp::tree_internal
