// Finds the tensors in the result of a forward(). Supports tensors, c10::IValue, and std::vector,
// array, pair, tuple, optional, map and unordered_map of those, nested to any depth. For a type of
// your own, add an overload in its namespace (found by argument-dependent lookup):
//
//   void CollectTensors(const MyOutput& output, std::vector<at::Tensor>& tensors) {
//     tensors.push_back(output.logits);
//   }
#pragma once

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/ivalue.h"

namespace ddp {

inline void CollectTensors(const at::Tensor& output, std::vector<at::Tensor>& tensors) {
  if (output.defined()) tensors.push_back(output);
}

// Numbers and strings hold no tensors.
template <typename T, std::enable_if_t<std::is_arithmetic_v<T> || std::is_enum_v<T> ||
                                           std::is_convertible_v<const T&, std::string>,
                                       int> = 0>
void CollectTensors(const T&, std::vector<at::Tensor>&) {}

inline void CollectTensors(const c10::IValue& output, std::vector<at::Tensor>& tensors);
template <typename T>
void CollectTensors(const std::vector<T>& output, std::vector<at::Tensor>& tensors);
template <typename T, size_t N>
void CollectTensors(const std::array<T, N>& output, std::vector<at::Tensor>& tensors);
template <typename T>
void CollectTensors(const std::optional<T>& output, std::vector<at::Tensor>& tensors);
template <typename A, typename B>
void CollectTensors(const std::pair<A, B>& output, std::vector<at::Tensor>& tensors);
template <typename... T>
void CollectTensors(const std::tuple<T...>& output, std::vector<at::Tensor>& tensors);
template <typename K, typename V>
void CollectTensors(const std::map<K, V>& output, std::vector<at::Tensor>& tensors);
template <typename K, typename V>
void CollectTensors(const std::unordered_map<K, V>& output, std::vector<at::Tensor>& tensors);

inline void CollectTensors(const c10::IValue& output, std::vector<at::Tensor>& tensors) {
  if (output.isTensor()) CollectTensors(output.toTensor(), tensors);
  if (output.isList()) {
    for (const c10::IValue& element : output.toListRef()) CollectTensors(element, tensors);
  }
  if (output.isTuple()) {
    for (const c10::IValue& element : output.toTupleRef().elements()) {
      CollectTensors(element, tensors);
    }
  }
  if (output.isGenericDict()) {
    for (const auto& entry : output.toGenericDict()) CollectTensors(entry.value(), tensors);
  }
}

template <typename T>
void CollectTensors(const std::vector<T>& output, std::vector<at::Tensor>& tensors) {
  for (const T& element : output) CollectTensors(element, tensors);
}

template <typename T, size_t N>
void CollectTensors(const std::array<T, N>& output, std::vector<at::Tensor>& tensors) {
  for (const T& element : output) CollectTensors(element, tensors);
}

template <typename T>
void CollectTensors(const std::optional<T>& output, std::vector<at::Tensor>& tensors) {
  if (output) CollectTensors(*output, tensors);
}

template <typename A, typename B>
void CollectTensors(const std::pair<A, B>& output, std::vector<at::Tensor>& tensors) {
  CollectTensors(output.first, tensors);
  CollectTensors(output.second, tensors);
}

template <typename... T>
void CollectTensors(const std::tuple<T...>& output, std::vector<at::Tensor>& tensors) {
  std::apply([&](const T&... element) { (CollectTensors(element, tensors), ...); }, output);
}

template <typename K, typename V>
void CollectTensors(const std::map<K, V>& output, std::vector<at::Tensor>& tensors) {
  for (const auto& [key, value] : output) CollectTensors(value, tensors);
}

template <typename K, typename V>
void CollectTensors(const std::unordered_map<K, V>& output, std::vector<at::Tensor>& tensors) {
  for (const auto& [key, value] : output) CollectTensors(value, tensors);
}

}  // namespace ddp
