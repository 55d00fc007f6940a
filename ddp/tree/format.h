// The bytes of an encoded nested value: what encoder.h writes and decoder.h reads.
//
// Format, in the byte order of x86 and ARM (little endian). `host` is
//
//   8 bytes "ddptree1", 8 bytes S, S bytes of nodes, then the tensors' elements in the order of
//   their nodes, each at a multiple of 16 bytes, with zeros between.
//
// `device` has the elements of tensors that need not pass through the host, by the same rule. A
// node is one byte, its tag, and
//
//   0x01 none                 no more. Also: an empty optional
//   0x02 tensor in `host`     dtype (c10::ScalarType) and device type (c10::DeviceType), one byte
//                             each, number of dimensions, sizes
//   0x03 tensor in `device`   the same
//   0x04 undefined tensor     no more
//   0x05 number               type (NumberType), its bytes
//   0x06 string               length, bytes
//   0x07 bytes                length, bytes
//   0x10 vector               count, nodes
//   0x11 vector of numbers    type, count, the numbers' bytes
//   0x12 members              count, nodes (array, pair, tuple, struct)
//   0x13 map                  count, key and value of each
//   0x14 optional             the node of its value
//   0x15 variant              index, the node of its value
//   0x20 IValue: list         element type, count, nodes
//   0x21 IValue: tuple        count, nodes
//   0x22 IValue: dict         key type, value type, count, key and value of each
//
// Lengths, counts, sizes and indices are varints: seven bits a byte, low bits first, the high bit
// set in all but the last. Other IValues are the nodes of their value: int64_t, double,
// c10::complex<double> and bool are numbers. Types of IValues are one byte and, for some, their
// parts: 0 any, 1 tensor, 2 int, 3 float, 4 bool, 5 str, 6 complex, 7 None, 8 Optional, 9 List,
// 10 Dict, 11 Tuple with a count.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "ATen/core/Tensor.h"
#include "ATen/core/ivalue.h"
#include "c10/core/DeviceType.h"
#include "c10/core/ScalarType.h"
#include "ddp/tree/kind.h"

namespace ddp {

struct EncodedTree {
  at::Tensor host;    // [n] uint8 on the CPU
  at::Tensor device;  // [m] uint8 on an accelerator; undefined if no tensor is there
};

// Kind and size of a number: 0 bool, 1 signed, 2 unsigned, 3 IEEE floating point, 4 complex,
// 5 bfloat16; times 32; plus the size in bytes.
using NumberType = uint8_t;

template <TreeNumber T>
constexpr NumberType NumberTypeOf() {
  if constexpr (std::is_enum_v<T>) {
    return NumberTypeOf<std::underlying_type_t<T>>();
  } else {
    const int kind = std::is_same_v<T, bool>            ? 0
                     : std::is_integral_v<T>            ? (std::is_signed_v<T> ? 1 : 2)
                     : tree_internal::kIsComplex<T>     ? 4
                     : std::is_same_v<T, c10::BFloat16> ? 5
                                                        : 3;
    static_assert(sizeof(T) < 32, "five bits hold the size");
    return static_cast<NumberType>(kind * 32 + sizeof(T));
  }
}

// The deepest nesting that can be encoded and decoded.
inline constexpr int kMaxTreeDepth = 500;

namespace tree_internal {

inline constexpr uint8_t kTagNone = 0x01, kTagHostTensor = 0x02, kTagDeviceTensor = 0x03,
                         kTagUndefined = 0x04, kTagNumber = 0x05, kTagString = 0x06,
                         kTagBytes = 0x07, kTagSequence = 0x10, kTagNumbers = 0x11,
                         kTagMembers = 0x12, kTagMap = 0x13, kTagOptional = 0x14,
                         kTagVariant = 0x15, kTagList = 0x20, kTagTuple = 0x21, kTagDict = 0x22;

inline constexpr char kMagic[] = "ddptree1";
inline constexpr size_t kPreamble = 16;

// Rounds up to a multiple of 16.
inline size_t Aligned(size_t offset) { return (offset + 15) / 16 * 16; }

// Whether the elements of this dtype are plain bytes.
bool IsPlain(c10::ScalarType dtype);
// Whether tensors of this device have memory.
bool HasMemory(c10::DeviceType device);

// Why a defined tensor cannot be encoded as plain bytes: "Sparse tensor", "nested tensor", … Empty
// if nothing does. Does not throw.
std::string NotPlainReason(const at::Tensor& tensor);

// The memory of a contiguous tensor: [nbytes] uint8.
at::Tensor AsBytes(const at::Tensor& tensor);

// 0 to 11, as in the format. Negative if the format lacks the type.
int TypeCode(const c10::Type& type);

// Whether an IValue may be in a list or dict of this type. c10 does not check that, and reads the
// elements without looking.
bool Fits(const c10::IValue& value, const c10::Type& type);
bool CanBeKey(const c10::IValue& value);
// Whether c10 has dicts with keys of this type.
bool CanBeKeyType(const c10::Type& type);

}  // namespace tree_internal
}  // namespace ddp
