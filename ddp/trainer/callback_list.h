// The callbacks of a run. Private to this folder.
//
//   CallbackList callbacks(std::move(all));
//   callbacks.Begin(CallbackContext(…));
//   DDP_RETURN_IF_ERROR(callbacks.SetUp());
//   DDP_RETURN_IF_ERROR(callbacks.Call(&Callback::OnEpochBegin));
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "ddp/collective_status.h"
#include "ddp/trainer/callback.h"

namespace ddp::trainer {

// Without callbacks, nothing that it does costs anything. Thread-compatible.
class CallbackList {
 public:
  bool empty() const { return callbacks_.empty(); }
  const std::vector<std::shared_ptr<Callback>>& all() const { return callbacks_; }
  void Add(std::shared_ptr<Callback> callback) { callbacks_.push_back(std::move(callback)); }
  // Call it before the first Call.
  void Begin(CallbackContext context) { context_.emplace(std::move(context)); }

  // OnSetUp of each in turn, up to the first error. Those that it was called of hear of a later
  // failure of the run, by Exception.
  absl::Status SetUp() {
    heard_set_up_ = 0;
    for (const std::shared_ptr<Callback>& each : callbacks_) {
      ++heard_set_up_;
      DDP_RETURN_IF_ERROR(CallOne(*each, &Callback::OnSetUp));
    }
    return absl::OkStatus();
  }

  // Calls a function of each in turn, up to the first error: "callback NAME: …".
  template <typename... Parameters, typename... Arguments>
  absl::Status Call(absl::Status (Callback::*event)(CallbackContext&, Parameters...),
                    const Arguments&... arguments) {
    for (const std::shared_ptr<Callback>& each : callbacks_) {
      DDP_RETURN_IF_ERROR(CallOne(*each, event, arguments...));
    }
    return absl::OkStatus();
  }

  // The same; then asks `stops`, a StopRequests or null, for the end if they have asked for it.
  template <typename Stops, typename Event, typename... Arguments>
  absl::Status Call(Stops* stops, Event event, const Arguments&... arguments) {
    DDP_RETURN_IF_ERROR(Call(event, arguments...));
    if (stops != nullptr && TakeRequest()) stops->RequestByCallback(stop_reason());
    return absl::OkStatus();
  }

  // OnStepEnd of each, of this rank's loss and what it counts. Adds what they record to `metrics`,
  // tags and values.
  absl::Status StepEnd(const at::Tensor& loss, double loss_count, bool is_recorded,
                       std::vector<std::pair<std::string, double>>& metrics) {
    context_->records_.clear();
    context_->is_recorded_ = is_recorded;
    context_->loss_count_ = loss_count;
    DDP_RETURN_IF_ERROR(Call(&Callback::OnStepEnd, loss));
    if (!std::exchange(context_->is_recorded_, false)) return absl::OkStatus();
    metrics.insert(metrics.end(), context_->records_.begin(), context_->records_.end());
    return absl::OkStatus();
  }

  // Call it once, for whatever failure after SetUp has begun; before that it does nothing.
  void Exception(const absl::Status& error) {
    for (size_t i = 0; i < heard_set_up_; ++i) {
      CatchStatus("", [&] { callbacks_[i]->OnException(*context_, error); }).IgnoreError();
    }
  }

  // Whether one has asked on this rank for the end of the run, since the last call; and why.
  bool TakeRequest() {
    return !callbacks_.empty() && std::exchange(context_->asks_to_stop_, false);
  }
  const std::string& stop_reason() const { return context_->stop_reason_; }

  // Measures how long this rank waits for a batch, if there are callbacks.
  template <typename F>
  auto WaitForData(F&& next) {
    return Measure(&CallbackContext::data_wait_s_, next);
  }
  // The same of an evaluation or a save between two steps.
  template <typename F>
  auto Pause(F&& work) {
    return Measure(&CallbackContext::pause_s_, work);
  }

 private:
  template <typename Event, typename... Arguments>
  absl::Status CallOne(Callback& callback, Event event, const Arguments&... arguments) {
    return Annotate(CatchCollective("", [&] { return (callback.*event)(*context_, arguments...); }),
                    absl::StrCat("callback ", callback.name()));
  }

  template <typename F>
  auto Measure(double CallbackContext::*seconds, F&& work) {
    if (callbacks_.empty()) return work();
    const absl::Time begin = absl::Now();
    auto result = work();
    *context_.*seconds += absl::ToDoubleSeconds(absl::Now() - begin);
    return result;
  }

  std::vector<std::shared_ptr<Callback>> callbacks_;
  size_t heard_set_up_ = 0;  // of callbacks_, from the first
  std::optional<CallbackContext> context_;
};

}  // namespace ddp::trainer
