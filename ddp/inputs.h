// Moves the tensors in an argument of forward() to a device. Supports tensors and std::vector,
// array, pair, tuple, optional, map and unordered_map of them, nested to any depth. Other types are
// passed through.
//
//   OnDevice<Args> moved(std::forward<Args>(arg), device);
//   module->forward(moved.get());
#pragma once

#include <array>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/core/Device.h"

namespace ddp {

template <typename T>
struct HoldsTensors : std::false_type {};
template <>
struct HoldsTensors<at::Tensor> : std::true_type {};
template <typename T>
struct HoldsTensors<std::vector<T>> : HoldsTensors<T> {};
template <typename T, size_t N>
struct HoldsTensors<std::array<T, N>> : HoldsTensors<T> {};
template <typename T>
struct HoldsTensors<std::optional<T>> : HoldsTensors<T> {};
template <typename A, typename B>
struct HoldsTensors<std::pair<A, B>> : std::disjunction<HoldsTensors<A>, HoldsTensors<B>> {};
template <typename... T>
struct HoldsTensors<std::tuple<T...>> : std::disjunction<HoldsTensors<T>...> {};
template <typename K, typename V>
struct HoldsTensors<std::map<K, V>> : HoldsTensors<V> {};
template <typename K, typename V>
struct HoldsTensors<std::unordered_map<K, V>> : HoldsTensors<V> {};

// In place, with non-blocking copies. Does nothing for types that hold no tensors.
template <typename T>
void MoveToDevice(T& value, c10::Device device) {
  if constexpr (!HoldsTensors<T>::value) {
    return;
  } else if constexpr (std::is_same_v<T, at::Tensor>) {
    if (value.defined()) value = value.to(device, /*non_blocking=*/true);
  } else if constexpr (requires { value.has_value(); }) {
    if (value.has_value()) MoveToDevice(*value, device);
  } else if constexpr (requires { value.find(value.begin()->first); }) {
    for (auto& entry : value) MoveToDevice(entry.second, device);
  } else if constexpr (requires { value.begin(); }) {
    for (auto& element : value) MoveToDevice(element, device);
  } else {
    std::apply([&](auto&... element) { (MoveToDevice(element, device), ...); }, value);
  }
}

// An argument during one call. `Arg` is as deduced for a forwarding reference. A type that holds
// tensors is copied, and the copy is moved to the device; for other types this is a reference.
template <typename Arg>
class OnDevice {
  using Value = std::remove_cv_t<std::remove_reference_t<Arg>>;
  static constexpr bool kCopies = HoldsTensors<Value>::value;

 public:
  OnDevice(Arg&& arg, c10::Device device) : held_(std::forward<Arg>(arg)) {
    if constexpr (kCopies) MoveToDevice(held_, device);
  }
  // With the constness and value category of the caller's argument.
  Arg&& get() { return static_cast<Arg&&>(held_); }

 private:
  std::conditional_t<kCopies, Value, Arg&&> held_;
};

}  // namespace ddp
