#include "ddp/trainer/stop_requests.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "base/exit_code.h"
#include "base/status.h"
#include "ddp/collective_status.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

namespace ddp::trainer {
namespace {

// c10d logs each wait that times out.
constexpr std::chrono::hours kWaitForRequest(1);

// What a request says of itself to the other ranks.
constexpr absl::string_view kMaxTime = "max_time";
constexpr absl::string_view kCallback = "callback ";
constexpr absl::string_view kSignal = "signal ";

std::vector<int> SignalsOf(const TrainerOptions& options) {
  std::vector<int> signals;
  for (const std::string& name : options.stop_signals) {
    if (const std::optional<int> signal = StopSignalOf(name)) signals.push_back(*signal);
  }
  return signals;
}

}  // namespace

c10::intrusive_ptr<c10d::Store> StoreOfRun(const session::Session& session) {
  if (session.size() == 1) return nullptr;
  const int64_t run = session.store()->add(absl::StrCat("trainer/runs/", session.rank()), 1);
  return c10::make_intrusive<c10d::PrefixStore>(absl::StrCat("trainer/run/", run), session.store());
}

StopRequests::StopRequests(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
                           const TrainerOptions& options, absl::Time began,
                           std::function<absl::Duration()> save_time)
    : signals_(SignalsOf(options)),
      began_(began),
      max_time_(options.max_time > absl::ZeroDuration() ? options.max_time
                                                        : absl::InfiniteDuration()),
      save_time_(std::move(save_time)),
      agreement_(std::move(store), rank, world_size, turn_, kWaitForRequest) {}

void StopRequests::RequestByCallback(absl::string_view why) {
  agreement_.Request(absl::StrCat(kCallback, why));
}

void StopRequests::Poll() {
  if (const int signal = signals_.received()) {
    agreement_.Request(absl::StrCat(kSignal, signal));
  } else if (max_time_ < absl::InfiniteDuration() &&
             absl::Now() - began_ + save_time_() >= max_time_) {
    agreement_.Request(kMaxTime);
  }
}

absl::StatusOr<bool> StopRequests::GoOn() {
  DDP_RETURN_IF_ERROR(CatchCollective("asking the ranks to stop", [&] {
    Poll();
    return absl::OkStatus();
  }));
  return agreement_.Enter(++turn_);
}

bool StopRequests::IsUrgent() {
  Poll();
  return signals_.received() != 0 || (agreement_.is_requested() && end().urgent());
}

absl::Status StopRequests::Interrupt(const session::Session& session) {
  // This rank may not have heard of the request yet.
  DDP_RETURN_IF_ERROR(CatchCollective("asking the ranks to stop", [&] {
    agreement_.Request();
    return absl::OkStatus();
  }));
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> signals,
                       session.AllGather(absl::StrCat(signals_.received())));
  for (const std::string& text : signals) {
    int signal = 0;
    if (interrupted_by_ == 0 && absl::SimpleAtoi(text, &signal)) interrupted_by_ = signal;
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> StopRequests::GivesUp() {
  bool gives_up = false;
  DDP_RETURN_IF_ERROR(CatchCollective("asking the ranks to stop", [&] {
    gives_up = IsUrgent();
    return absl::OkStatus();
  }));
  return gives_up;
}

absl::StatusOr<bool> StopRequests::AreComplete(const session::Session& session, bool mine) {
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> all, session.AllGather(mine ? "1" : "0"));
  if (std::find(all.begin(), all.end(), "0") == all.end()) return true;
  DDP_RETURN_IF_ERROR(Interrupt(session));
  return false;
}

RunEnd StopRequests::end() const {
  const std::string note = agreement_.note();
  absl::string_view text = note;
  RunEnd end;
  if (text == kMaxTime) {
    end.reason = EndReason::kMaxTime;
  } else if (absl::ConsumePrefix(&text, kSignal) && absl::SimpleAtoi(text, &end.signal)) {
    end.reason = EndReason::kSignal;
  } else if (interrupted_by_ != 0) {
    end = {.reason = EndReason::kSignal, .signal = interrupted_by_};
  } else {
    end.reason = EndReason::kCallback;
    absl::ConsumePrefix(&text, kCallback);
    end.why = std::string(text);
  }
  return end;
}

std::string RunEnd::Name() const {
  switch (reason) {
    case EndReason::kEnd:
      return "end";
    case EndReason::kMaxSteps:
      return "max_steps";
    case EndReason::kStopAtStep:
      return "stop_at_step";
    case EndReason::kMaxTime:
      return "max_time";
    case EndReason::kCallback:
      return "callback";
    case EndReason::kSignal:
      return absl::StrCat("signal ", StopSignalName(signal));
  }
  return "";
}

absl::Status RunEnd::status() const {
  return reason == EndReason::kSignal ? EndedBy(signal) : absl::OkStatus();
}

}  // namespace ddp::trainer
