// Callbacks: code of one's own at the events of a run of Train, with state in its checkpoints.
//
//   class Chat final : public trainer::Callback {
//    public:
//     std::string name() const override { return "chat"; }
//     absl::Status OnStepEnd(trainer::CallbackContext& run, const at::Tensor&) override {
//       if (run.is_recorded()) run.Record("train/chat", Measure(run.module()));
//       if (run.position().step == 1000) run.RequestStop("enough");
//       return absl::OkStatus();
//     }
//   };
//   options.callbacks = {std::make_shared<Chat>()};
//
// The built-in ones, which options switch on, are in callbacks/. docs/training_callbacks.md says
// more. Both classes are thread-compatible; the training thread alone uses them.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "checkpoint/stateful.h"
#include "ddp/distributed_optimizer.h"
#include "ddp/session/session.h"
#include "ddp/trainer/position.h"
#include "torch/nn/module.h"

namespace ddp::trainer {

// A phase of the task (task.h), of which a task without phases has one.
struct CallbackPhase {
  std::string suffix;  // of its names in logs and checkpoints: ".generator"; empty for the first
  DistributedOptimizer& optimizer;
};

// The part of a run that a callback sees, and its requests. What it refers to belongs to the run.
class CallbackContext {
 public:
  using PrintLine = std::function<void(absl::string_view line)>;
  // `phases`: at least one.
  CallbackContext(const session::Session& session, torch::nn::Module& module,
                  std::vector<CallbackPhase> phases, const Position& position, PrintLine print)
      : session_(session),
        module_(module),
        phases_(std::move(phases)),
        position_(position),
        print_(std::move(print)) {}

  const session::Session& session() const { return session_; }
  // The task's. It has all parameters of the last step at each event.
  torch::nn::Module& module() const { return module_; }
  // The phases are in the order of the task.
  const std::vector<CallbackPhase>& phases() const { return phases_; }
  // The optimizer of the first phase, or the only one.
  DistributedOptimizer& optimizer() const { return phases_[0].optimizer; }
  // Complete epochs and steps of the whole run, also those before a resume.
  const Position& position() const { return position_; }
  // How long this rank has waited for batches so far, in this process.
  double data_wait_s() const { return data_wait_s_; }
  // How long evaluations and saves between two steps of an epoch have taken so far.
  double pause_s() const { return pause_s_; }

  // Whether the step is recorded in the logs, at OnStepEnd; the same on all ranks.
  bool is_recorded() const { return is_recorded_; }
  // The count of this rank's losses of the step, at OnStepEnd (StepOutput::loss), in examples or
  // tokens; 0 where it has run out of batches. It is the weight of its `loss` in a mean over ranks
  // or steps.
  double loss_count() const { return loss_count_; }
  // Adds a value to the records of this step: of rank 0, and at OnStepEnd if is_recorded(); else
  // nothing happens.
  void Record(std::string tag, double value) { records_.emplace_back(std::move(tag), value); }
  // Prints a line, on rank 0, if progress is shown.
  void Print(absl::string_view line) const { print_(line); }

  // Asks for the end of the run, which then saves, and can be resumed: RunEnd::why is `why` then.
  // One rank is enough. All stop after the same step: this one or the next, at OnStart and
  // OnEpochBegin before the next or after it; if all ranks ask at one event, without a further
  // step. An evaluation that has begun comes to its end.
  void RequestStop(std::string why) {
    asks_to_stop_ = true;
    stop_reason_ = std::move(why);
  }

 private:
  friend class CallbackList;

  const session::Session& session_;
  torch::nn::Module& module_;
  const std::vector<CallbackPhase> phases_;
  const Position& position_;
  const PrintLine print_;
  double data_wait_s_ = 0;
  double pause_s_ = 0;
  bool is_recorded_ = false;
  double loss_count_ = 0;
  std::deque<std::pair<std::string, double>> records_;
  bool asks_to_stop_ = false;
  std::string stop_reason_;
};

// All ranks have the same callbacks in the same order (TrainerOptions::callbacks), and each event
// calls all of them, one after the other, on all ranks: so they may communicate. An error or an
// exception on one rank ends the run on all ranks, as "callback NAME: …". A callback's functions
// must leave the position, the generators of random numbers and the gradients alone, or the run is
// no longer that of the seed.
class Callback {
 public:
  virtual ~Callback() = default;

  // The name in messages. If it has state, it is the key in checkpoints, which no other component
  // has.
  virtual std::string name() const = 0;
  // Its state, which each checkpoint has under its name, and which is loaded after OnSetUp; null:
  // it has none.
  virtual checkpoint::Stateful* stateful() { return nullptr; }

  // The module is on its device and wrapped, and has the weights with which a new run begins. A
  // checkpoint has not been loaded yet: the place to make what a state must fit to.
  virtual absl::Status OnSetUp(CallbackContext&) { return absl::OkStatus(); }
  // Runs before the first step of this process, or the evaluation of eval_only. State is loaded.
  virtual absl::Status OnStart(CallbackContext&) { return absl::OkStatus(); }
  // These run around the steps of an epoch, or of what the run takes of it.
  virtual absl::Status OnEpochBegin(CallbackContext&) { return absl::OkStatus(); }
  virtual absl::Status OnEpochEnd(CallbackContext&) { return absl::OkStatus(); }
  // Runs after each optimizer step, which position() counts, but for those that the guard has
  // skipped or left out (TrainerOptions::guard). `loss`: this rank's mean over the step's batches;
  // 0 where it has run out of batches (even_batches=false), as loss_count() tells.
  virtual absl::Status OnStepEnd(CallbackContext&, const at::Tensor& /*loss*/) {
    return absl::OkStatus();
  }
  // These run around each evaluation. `metrics` are named as in the logs, "test/accuracy", and the
  // same on all ranks. They are empty if it was given up, for a signal or max_time: the run that
  // goes on makes it.
  virtual absl::Status OnEvaluationBegin(CallbackContext&) { return absl::OkStatus(); }
  virtual absl::Status OnEvaluationEnd(CallbackContext&,
                                       const std::map<std::string, double>& /*metrics*/) {
    return absl::OkStatus();
  }
  // Runs before each save: what it changes in its state is saved. `checkpoint` is such as
  // "epoch_3".
  virtual absl::Status OnSave(CallbackContext&, const std::string& /*checkpoint*/) {
    return absl::OkStatus();
  }
  // Runs after the run's last save.
  virtual absl::Status OnEnd(CallbackContext&) { return absl::OkStatus(); }
  // Runs once if the run fails after OnSetUp has begun, also before OnStart, or after OnEnd in what
  // follows it: with the error of all ranks. The process group cannot be used any more.
  virtual void OnException(CallbackContext&, const absl::Status& /*error*/) {}
};

}  // namespace ddp::trainer
