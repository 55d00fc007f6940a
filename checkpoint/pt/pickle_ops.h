// The pickle opcodes (Python's pickletools) that protocol 2 pickles of plain data use, and torch's
// names of dtypes.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace ddp::checkpoint::pt {

// Containers nested deeper than this are refused, in both directions.
inline constexpr int kMaxDepth = 100;

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
};

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

inline const DtypeName* DtypeOfName(absl::string_view global) {
  if (!absl::ConsumePrefix(&global, "torch.")) return nullptr;
  for (const DtypeName& entry : kDtypeNames) {
    if (entry.name == global) return &entry;
  }
  return nullptr;
}

}  // namespace ddp::checkpoint::pt
