// For tests: a state with every kind of value, and a comparison of values.
//
//   EXPECT_EQ(Difference(SampleState().root, format->Read(path)->root), "");
#pragma once

#include <ATen/core/ivalue.h>

#include <string>

#include "base/coordinator.h"
#include "checkpoint/format.h"
#include "checkpoint/state.h"

namespace ddp::checkpoint {

// Every kind of value and dtype that state.h lists, with corner cases: 64-bit integers, infinities
// and NaN, empty containers and strings, int keys, tensors without dimensions or elements, strided
// tensors, and two views of one storage.
State SampleState();

// Path and kind of the first difference between `a` and `b`; "" if they are equal. Tensors must
// have equal dtype, shape and bits. Whether a dict or list is typed does not matter.
std::string Difference(const c10::IValue& a, const c10::IValue& b, const std::string& path = "");

// FormatOptions::broadcast by the messages of `ranks`, which outlives it.
BroadcastBytes BroadcastOver(const Coordinator& ranks);

}  // namespace ddp::checkpoint
