#pragma once

#include <functional>

namespace ddp {

// For tests: calls body(0) … body(count - 1), each in a thread of its own, at the same time, and
// joins them.
void RunThreads(int count, const std::function<void(int index)>& body);

}  // namespace ddp
