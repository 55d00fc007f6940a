// The pickle opcodes (Python's pickletools) that pickles of plain data use in protocols 2 to 5, and
// torch's names of dtypes.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace ddp::checkpoint::pt {

// Containers nested deeper than this are refused, in both directions.
inline constexpr int kMaxDepth = 100;

// Longer keys of dicts are refused, in both directions, in bytes: many dicts may have one key, and
// long ones would take time.
inline constexpr size_t kMaxKey = 4096;

// Longer pickles are refused, in both directions. A tensor takes about 200 bytes; a parsed pickle
// takes many times its length in memory.
inline constexpr uint64_t kMaxPickle = uint64_t{256} << 20;

enum class Opcode : uint8_t {
  kMark = '(',
  kStop = '.',
  kNone = 'N',
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kBinInt = 'J',          // int32
  kBinInt1 = 'K',         // uint8
  kBinInt2 = 'M',         // uint16
  kLong1 = 0x8a,          // length (uint8), two's complement
  kBinFloat = 'G',        // big-endian
  kBinUnicode = 'X',      // length (uint32), UTF-8
  kShortBinString = 'U',  // length (uint8), bytes; used by torch's C++ writer
  kEmptyTuple = ')',
  kTuple = 't',
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kEmptyList = ']',
  kAppend = 'a',
  kAppends = 'e',
  kEmptyDict = '}',
  kSetItem = 's',
  kSetItems = 'u',
  kBinGet = 'h',
  kLongBinGet = 'j',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kGlobal = 'c',  // module, newline, name, newline
  kReduce = 'R',
  kNewObject = 0x81,
  kBuild = 'b',
  kBinPersId = 'Q',
  kProtocol = 0x80,
  // Protocols 3 to 5 have these; torch.save uses them if pickle_protocol says so.
  kBinBytes = 'B',          // length (uint32), bytes
  kShortBinBytes = 'C',     // length (uint8), bytes
  kLong4 = 0x8b,            // length (int32), two's complement
  kShortBinUnicode = 0x8c,  // length (uint8), UTF-8
  kBinUnicode8 = 0x8d,      // length (uint64), UTF-8
  kBinBytes8 = 0x8e,        // length (uint64), bytes
  kEmptySet = 0x8f,
  kAddItems = 0x90,
  kFrozenSet = 0x91,
  kNewObjectEx = 0x92,
  kStackGlobal = 0x93,  // module and name are on the stack
  kMemoize = 0x94,
  kFrame = 0x95,       // length (uint64) of the opcodes that follow
  kByteArray8 = 0x96,  // length (uint64), bytes
};

struct DtypeName {
  c10::ScalarType dtype;
  absl::string_view name;     // "float32" of torch.float32
  absl::string_view storage;  // "FloatStorage"; empty for dtypes without one
};

inline constexpr DtypeName kDtypeNames[] = {
    {c10::ScalarType::Float, "float32", "FloatStorage"},
    {c10::ScalarType::Double, "float64", "DoubleStorage"},
    {c10::ScalarType::Half, "float16", "HalfStorage"},
    {c10::ScalarType::BFloat16, "bfloat16", "BFloat16Storage"},
    {c10::ScalarType::Long, "int64", "LongStorage"},
    {c10::ScalarType::Int, "int32", "IntStorage"},
    {c10::ScalarType::Short, "int16", "ShortStorage"},
    {c10::ScalarType::Char, "int8", "CharStorage"},
    {c10::ScalarType::Byte, "uint8", "ByteStorage"},
    {c10::ScalarType::Bool, "bool", "BoolStorage"},
    {c10::ScalarType::ComplexFloat, "complex64", "ComplexFloatStorage"},
    {c10::ScalarType::ComplexDouble, "complex128", "ComplexDoubleStorage"},
    {c10::ScalarType::UInt16, "uint16", ""},
    {c10::ScalarType::UInt32, "uint32", ""},
    {c10::ScalarType::UInt64, "uint64", ""},
    {c10::ScalarType::Float8_e4m3fn, "float8_e4m3fn", ""},
    {c10::ScalarType::Float8_e4m3fnuz, "float8_e4m3fnuz", ""},
    {c10::ScalarType::Float8_e5m2, "float8_e5m2", ""},
    {c10::ScalarType::Float8_e5m2fnuz, "float8_e5m2fnuz", ""},
    {c10::ScalarType::Float8_e8m0fnu, "float8_e8m0fnu", ""},
    {c10::ScalarType::Float4_e2m1fn_x2, "float4_e2m1fn_x2", ""},
    {c10::ScalarType::ComplexHalf, "complex32", ""},
    {c10::ScalarType::Bits8, "bits8", ""},
    {c10::ScalarType::Bits16, "bits16", ""},
    {c10::ScalarType::Bits1x8, "bits1x8", ""},
    {c10::ScalarType::Bits2x4, "bits2x4", ""},
    {c10::ScalarType::Bits4x2, "bits4x2", ""},
};

// Names of dtypes as plain values, beyond those above.
inline constexpr absl::string_view kOtherDtypeNames[] = {
    "qint8", "quint8", "qint32", "quint4x2", "quint2x4", "bcomplex32", "int1",
    "int2",  "int3",   "int4",   "int5",     "int6",     "int7",       "uint1",
    "uint2", "uint3",  "uint4",  "uint5",    "uint6",    "uint7"};

inline const DtypeName* FindDtype(c10::ScalarType dtype) {
  for (const DtypeName& entry : kDtypeNames) {
    if (entry.dtype == dtype) return &entry;
  }
  return nullptr;
}

// Look up by storage class ("torch.FloatStorage") or by dtype ("torch.float32"); nullptr if
// unknown.
inline const DtypeName* DtypeOfStorage(absl::string_view global) {
  if (!absl::ConsumePrefix(&global, "torch.")) return nullptr;
  for (const DtypeName& entry : kDtypeNames) {
    if (!entry.storage.empty() && entry.storage == global) return &entry;
  }
  return nullptr;
}

// The type of the integers in a storage of quantized ones ("torch.QInt8Storage"); nullptr if
// unknown, as for those of less than a byte.
inline const DtypeName* IntegersOfStorage(absl::string_view global) {
  if (global == "torch.QInt8Storage") return FindDtype(c10::ScalarType::Char);
  if (global == "torch.QUInt8Storage") return FindDtype(c10::ScalarType::Byte);
  if (global == "torch.QInt32Storage") return FindDtype(c10::ScalarType::Int);
  return nullptr;
}

inline const DtypeName* DtypeOfName(absl::string_view global) {
  if (!absl::ConsumePrefix(&global, "torch.")) return nullptr;
  for (const DtypeName& entry : kDtypeNames) {
    if (entry.name == global) return &entry;
  }
  return nullptr;
}

}  // namespace ddp::checkpoint::pt
