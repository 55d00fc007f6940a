// For tests: a state with one of everything, and the comparison of two.
//
//   EXPECT_EQ(Difference(SampleState().root, format->Read(path)->root), "");
#pragma once

#include <ATen/core/ivalue.h>

#include <string>

#include "checkpoint/state.h"

namespace ddp::checkpoint {

// Every kind of value and element type that state.h names, with the corner cases: integers of 64
// bits, infinities and NaN, empty containers and texts, int keys, tensors without dimensions or
// elements, with strides, and two views of one storage.
State SampleState();

// Of the first place where `b` differs from `a`, path and how; "" if they are equal. Tensors must
// have equal element type, shape and bits. Whether a dict or list is typed does not matter.
std::string Difference(const c10::IValue& a, const c10::IValue& b, const std::string& path = "");

}  // namespace ddp::checkpoint
