// For tests: what a thread sends in collectives.
//
//   const SentTensors sent;
//   model->forward(x).sum().backward();  // on the CPU, backward runs on the thread that calls it
//   for (const SentTensors::Tensor& tensor : sent.OfAtLeast(1024)) EXPECT_TRUE(tensor.in_arena);
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/record_function.h"
#include "absl/strings/match.h"
#include "ddp/nets_testing.h"

namespace ddp {

// The tensors that its thread's calls of c10d read while it exists. One at a time in a thread.
class SentTensors {
 public:
  struct Tensor {
    std::string operation;  // "c10d::allreduce_"
    int64_t bytes;
    bool in_arena;
  };

  SentTensors()
      : handle_(
            at::addThreadLocalCallback(at::RecordFunctionCallback(&Record).needsInputs(true).scopes(
                {at::RecordScope::FUNCTION}))) {
    Current() = &tensors_;
  }
  ~SentTensors() {
    at::removeCallback(handle_);
    Current() = nullptr;
  }
  SentTensors(const SentTensors&) = delete;
  SentTensors& operator=(const SentTensors&) = delete;

  std::vector<Tensor> OfAtLeast(int64_t bytes) const {
    std::vector<Tensor> large;
    for (const Tensor& tensor : tensors_) {
      if (tensor.bytes >= bytes) large.push_back(tensor);
    }
    return large;
  }

 private:
  static std::vector<Tensor>*& Current() {
    thread_local std::vector<Tensor>* current = nullptr;
    return current;
  }

  static std::unique_ptr<at::ObserverContext> Record(const at::RecordFunction& function) {
    const std::string name = function.name();
    if (!absl::StartsWith(name, "c10d::")) return nullptr;
    // The first argument of all-gather, reduce-scatter and the like is what they write.
    const bool in_place = absl::StartsWith(name, "c10d::allreduce") || name == "c10d::broadcast_" ||
                          name == "c10d::reduce_" || name == "c10d::send";
    for (const c10::IValue& input : function.inputs().slice(in_place ? 0 : 1)) Add(name, input);
    return nullptr;
  }

  static void Add(const std::string& operation, const c10::IValue& value) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (!tensor.defined() || !tensor.has_storage()) return;
      Current()->push_back({operation, static_cast<int64_t>(tensor.nbytes()), InArena(tensor)});
    } else if (value.isList()) {
      for (const c10::IValue& element : value.toListRef()) Add(operation, element);
    }
  }

  std::vector<Tensor> tensors_;
  const at::CallbackHandle handle_;
};

}  // namespace ddp
