#include "backends/mpi/work.h"

#include <exception>
#include <string>
#include <utility>

#include "ATen/core/ivalue.h"
#include "c10/util/Exception.h"

namespace ddp::backends::mpi {
namespace {

c10::TypePtr FutureType(size_t lists) {
  const c10::TypePtr list = c10::ListType::create(c10::TensorType::get());
  return lists > 1 ? c10::ListType::create(list) : list;
}

std::exception_ptr ToException(const absl::Status& status) {
  return std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, std::string(status.message())));
}

}  // namespace

MpiWork::MpiWork(int rank, c10d::OpType type, const char* title, uint64_t sequence_number,
                 const std::vector<at::Tensor>& inputs,
                 std::vector<std::vector<at::Tensor>> outputs)
    : Work(rank, type, title, inputs),
      sequence_number_(sequence_number),
      outputs_(std::move(outputs)),
      future_(c10::make_intrusive<c10::ivalue::Future>(FutureType(outputs_.size()))) {}

void MpiWork::Done(const absl::Status& status, int source) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    source_ = source;
  }
  if (!status.ok()) {
    const std::exception_ptr error = ToException(status);
    future_->setError(error);
    finish(error);
    return;
  }
  if (outputs_.size() > 1) {
    future_->markCompleted(c10::IValue(outputs_));
  } else {
    future_->markCompleted(
        c10::IValue(outputs_.empty() ? std::vector<at::Tensor>() : outputs_.front()));
  }
  finish();
}

int MpiWork::sourceRank() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return source_;
}

std::vector<at::Tensor> MpiWork::result() {
  TORCH_CHECK(isCompleted(), "wait() for the work before its result()");
  TORCH_CHECK(outputs_.size() <= 1, "a list of lists is no result(); take getFuture()->value()");
  return outputs_.empty() ? std::vector<at::Tensor>() : outputs_.front();
}

}  // namespace ddp::backends::mpi
