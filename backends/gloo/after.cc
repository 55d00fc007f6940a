#include "backends/gloo/after.h"

#include <exception>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/core/ivalue.h"
#include "c10/util/Exception.h"

namespace ddp::backends::gloo {
namespace {

using c10::ivalue::Future;

// A future refuses tensors on devices that it has not been told.
std::vector<c10::Device> DevicesOf(const std::vector<std::vector<at::Tensor>>& lists) {
  std::vector<c10::Device> devices;
  for (const std::vector<at::Tensor>& list : lists) {
    for (const at::Tensor& tensor : list) {
      if (!tensor.device().is_cpu()) devices.push_back(tensor.device());
    }
  }
  return devices;
}

class AfterWork final : public c10d::Work {
 public:
  AfterWork(c10d::OpType type, uint64_t sequence_number,
            std::vector<std::vector<at::Tensor>> outputs, std::function<void()> last)
      : Work(/*rank=*/-1, type),
        sequence_number_(sequence_number),
        outputs_(std::move(outputs)),
        last_(std::move(last)) {
    const auto tensors = c10::ListType::create(c10::TensorType::get());
    future_ = c10::make_intrusive<Future>(
        outputs_.size() > 1 ? c10::ListType::create(tensors) : tensors, DevicesOf(outputs_));
  }

  // Called once, with the error of the preceding work, or null.
  void Continue(std::exception_ptr error) {
    if (!error) {
      try {
        const at::NoGradGuard no_grad;
        last_();
      } catch (...) {
        error = std::current_exception();
      }
    }
    last_ = nullptr;  // releases its tensors
    if (error) {
      future_->setError(error);
    } else if (outputs_.size() > 1) {
      future_->markCompleted(c10::IValue(outputs_));
    } else {
      future_->markCompleted(c10::IValue(result()));
    }
    finish(error);
  }

  c10::intrusive_ptr<Future> getFuture() override { return future_; }

  std::vector<at::Tensor> result() override {
    return outputs_.empty() ? std::vector<at::Tensor>() : outputs_[0];
  }

  uint64_t getSequencenumber() const override { return sequence_number_; }

 private:
  const uint64_t sequence_number_;
  const std::vector<std::vector<at::Tensor>> outputs_;
  std::function<void()> last_;
  c10::intrusive_ptr<Future> future_;
};

}  // namespace

c10::intrusive_ptr<c10d::Work> After(const c10::intrusive_ptr<c10d::Work>& work, c10d::OpType type,
                                     std::vector<std::vector<at::Tensor>> outputs,
                                     std::function<void()> last) {
  TORCH_INTERNAL_ASSERT(c10d::opTypeToString(work->retrieveOpType()).size() <= 15);
  auto after = c10::make_intrusive<AfterWork>(type, work->getSequencenumber(), std::move(outputs),
                                              std::move(last));
  work->getFuture()->addCallback(
      [after](Future& done) { after->Continue(done.hasError() ? done.exception_ptr() : nullptr); });
  return after;
}

}  // namespace ddp::backends::gloo
