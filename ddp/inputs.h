// Moves the tensors in an argument of forward() to a device. Supports the types of ddp/tree/tree.h;
// parts of other types are passed on.
//
//   OnDevice<Args> moved(std::forward<Args>(arg), device);
//   module->forward(moved.get());
#pragma once

#include <type_traits>
#include <utility>

#include "c10/core/Device.h"
#include "ddp/tree/tree.h"

namespace ddp {

// An argument during one call. `Arg` is as deduced for a forwarding reference. A type that holds
// tensors is copied, and the copy is moved to the device; for other types this is a reference.
template <typename Arg>
class OnDevice {
  using Value = std::remove_cv_t<std::remove_reference_t<Arg>>;
  static constexpr bool kCopies = HoldsTensors<Value>();

 public:
  OnDevice(Arg&& arg, c10::Device device) : held_(std::forward<Arg>(arg)) {
    if constexpr (kCopies) MoveToDevice(held_, device);
  }
  // The result has the constness and value category of the caller's argument.
  Arg&& get() { return static_cast<Arg&&>(held_); }

 private:
  std::conditional_t<kCopies, Value, Arg&&> held_;
};

}  // namespace ddp
