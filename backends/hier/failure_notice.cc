#include "backends/hier/failure_notice.h"

#include <pthread.h>

#include <exception>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace ddp::backends::hier {
namespace {

constexpr char kKey[] = "failure";
constexpr auto kInterval = std::chrono::milliseconds(200);
constexpr auto kPatience = std::chrono::seconds(2);

}  // namespace

FailureNotice::FailureNotice(const c10::intrusive_ptr<c10d::Store>& store,
                             std::function<void(const std::string& first)> on_failure)
    : store_(store->clone()), on_failure_(std::move(on_failure)), thread_([this] { Loop(); }) {}

FailureNotice::~FailureNotice() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::string FailureNotice::Post(const std::string& message) {
  std::unique_lock<std::mutex> lock(mutex_);
  own_ = message;
  changed_.notify_all();
  changed_.wait_for(lock, kPatience, [this] { return first_.has_value(); });
  return first_.value_or(message);
}

void FailureNotice::AddBusy(int change) {
  std::lock_guard<std::mutex> lock(mutex_);
  busy_ += change;
  if (busy_ == 1 && change == 1) changed_.notify_all();
}

std::optional<std::string> FailureNotice::Ask(const std::optional<std::string>& message) {
  try {
    if (message.has_value()) return store_->compareSet(kKey, "", *message);
    if (store_->check({kKey})) return store_->get_to_str(kKey);
  } catch (const std::exception&) {
    if (message.has_value()) {
      return absl::StrCat(*message,
                          " (the store does not answer, either: has the rank ended that serves it,"
                          " rank 0 unless the launcher does?)");
    }
  }
  return std::nullopt;
}

void FailureNotice::Loop() {
  pthread_setname_np(pthread_self(), "hier_notice");
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    if (first_.has_value()) {
      changed_.wait(lock);
      continue;
    }
    if (!own_.has_value()) {
      if (busy_ == 0) {
        changed_.wait(lock);
        continue;
      }
      // Most collectives end sooner, and cost the store nothing.
      changed_.wait_for(lock, kInterval, [this] { return stopping_ || own_.has_value(); });
      if (stopping_ || (busy_ == 0 && !own_.has_value())) continue;
    }
    const std::optional<std::string> own = own_;
    lock.unlock();
    std::optional<std::string> first = Ask(own);
    if (first.has_value() && !own.has_value()) on_failure_(*first);
    lock.lock();
    if (first.has_value()) {
      first_ = std::move(first);
      changed_.notify_all();
    }
  }
}

}  // namespace ddp::backends::hier
