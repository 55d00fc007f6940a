// A batch of examples: any nested value (ddp/tree/tree.h), and a value that holds one of any type.
//
//   struct Cameras { at::Tensor rotation; std::vector<std::string> names; };  // with a FieldsOf
//   data::AnyBatch batch(Cameras{…});
//   batch.To(device);                         // all tensors in it
//   Cameras& cameras = batch.Get<Cameras>();  // another type: an error that names both
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/core/Device.h"
#include "c10/util/Exception.h"
#include "c10/util/Type.h"
#include "ddp/tree/tree.h"

namespace ddp::data {

// `n` examples, collated along dimension 0: the batch of a model with one input.
struct Batch {
  at::Tensor input;  // [n, …]
  // [n] int64 class indices for classification, otherwise the task's own; undefined: none.
  at::Tensor target;
};

constexpr auto FieldsOf(const Batch&) {
  return Fields(Field("input", &Batch::input), Field("target", &Batch::target));
}

namespace batch_internal {

struct Pinner {
  static constexpr bool kTensorsOnly = true;
  void operator()(at::Tensor& tensor, const TreePath&) const {
    if (tensor.defined() && tensor.is_cpu()) tensor = tensor.pin_memory();
  }
  template <typename T>
  void Other(T&, const TreePath&) const {}
};

}  // namespace batch_internal

// See AnyBatch::PinMemory.
template <Tree B>
void PinMemory(B& batch) {
  VisitTree(batch, batch_internal::Pinner{});
}

// Owns a value of a tree type, or nothing. Moves; no copies. Thread-compatible.
class AnyBatch {
 public:
  AnyBatch() = default;
  template <Tree B>
  requires(!std::same_as<B, AnyBatch>) explicit AnyBatch(B batch)
      : holder_(std::make_unique<Holder<B>>(std::move(batch))) {}

  // Throws c10::Error, with the names of both types, if it holds another type or nothing.
  template <Tree B>
  B& Get() {
    TORCH_CHECK(Is<B>(), "the batches of this data set are of type ", type_name(),
                ", but the task takes ", c10::demangle(typeid(B).name()),
                ": use a data set and a task of one type");
    return static_cast<Holder<B>&>(*holder_).batch;
  }
  template <Tree B>
  bool Is() const {
    return holder_ != nullptr && holder_->type() == typeid(B);
  }
  bool has_value() const { return holder_ != nullptr; }
  std::string type_name() const {
    return holder_ == nullptr ? "none" : c10::demangle(holder_->type().name());
  }

  // Moves all tensors to `device`, with non-blocking copies.
  void To(c10::Device device) {
    if (holder_ != nullptr) holder_->To(device);
  }

  // Moves the tensors that are on the CPU into pinned memory, from which copies to a GPU run beside
  // the program. The calling thread's device must be one that has pinned memory.
  void PinMemory() {
    if (holder_ != nullptr) holder_->PinMemory();
  }

  // The data set's indices of the examples, if a loader has made the batch; else empty.
  const std::vector<int64_t>& indices() const { return indices_; }
  void set_indices(std::vector<int64_t> indices) { indices_ = std::move(indices); }

  // Number of examples: what the function size() of a struct with a FieldsOf says; else the number
  // of indices; else dimension 0 of the first tensor, 0 if there is none.
  int64_t size() const {
    if (holder_ == nullptr) return 0;
    if (const int64_t own = holder_->OwnSize(); own >= 0) return own;
    return indices_.empty() ? holder_->FirstDimension() : static_cast<int64_t>(indices_.size());
  }

 private:
  struct HolderBase {
    virtual ~HolderBase() = default;
    virtual const std::type_info& type() const = 0;
    virtual void To(c10::Device device) = 0;
    virtual void PinMemory() = 0;
    virtual int64_t OwnSize() const = 0;  // -1: the type does not say
    virtual int64_t FirstDimension() const = 0;
  };

  template <typename B>
  struct Holder final : HolderBase {
    explicit Holder(B batch) : batch(std::move(batch)) {}
    const std::type_info& type() const override { return typeid(B); }
    void To(c10::Device device) override { MoveToDevice(batch, device); }
    void PinMemory() override { data::PinMemory(batch); }
    int64_t OwnSize() const override {
      if constexpr (tree_internal::HasFields<B> && requires {
                      { batch.size() } -> std::convertible_to<int64_t>;
                    }) {
        return static_cast<int64_t>(batch.size());
      } else {
        return -1;
      }
    }
    int64_t FirstDimension() const override {
      std::vector<at::Tensor> tensors;
      CollectTensors(batch, tensors);
      return tensors.empty() || tensors[0].dim() == 0 ? 0 : tensors[0].size(0);
    }
    B batch;
  };

  std::unique_ptr<HolderBase> holder_;
  std::vector<int64_t> indices_;
};

}  // namespace ddp::data
