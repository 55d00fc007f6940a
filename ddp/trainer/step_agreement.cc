#include "ddp/trainer/step_agreement.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "ddp/collective_status.h"

namespace ddp::trainer {
namespace {

// Keys of a round, which ends with a common step. The first has the value that was set first:
// kClosed, or kRequested and a note.
constexpr char kOutcome[] = "outcome";
constexpr char kRequested[] = "requested ";
constexpr char kClosed[] = "closed";
// Set after kOutcome. Needed because in some stores compareSet does not wake waiters.
constexpr char kDecided[] = "decided";

std::vector<uint8_t> Bytes(absl::string_view text) { return {text.begin(), text.end()}; }

std::string Text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

std::string Key(int64_t round, const char* name) { return absl::StrCat(round, "/", name); }

std::string EnteredKey(int64_t round, int rank) {
  return absl::StrCat(Key(round, "entered"), "/", rank);
}

}  // namespace

struct StepAgreement::State {
  c10::intrusive_ptr<c10d::Store> store;
  int rank;
  int world_size;
  std::chrono::milliseconds wait;
  std::atomic<bool> abandoned{false};
  std::thread thread;

  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex.
  int64_t entered;
  bool requested = false;  // this rank knows of a request in its round: `entered` is final
  std::string note;        // of that request
  bool closed = false;
  int64_t listens_to = 0;  // the round whose outcome the thread waits for

  // The training thread's; it alone changes it, under the mutex.
  int64_t round = 0;
  // Used by the training thread only.
  std::optional<int64_t> last;

  // Sets the outcome, if it is not set, and returns it.
  std::string Decide(const std::string& value) {
    const std::string outcome =
        Text(store->compareSet(Key(round, kOutcome), Bytes(""), Bytes(value)));
    store->set(Key(round, kDecided), Bytes("1"));
    return outcome;
  }

  // Of a request. `connection`: null with a world size of 1.
  void Notice(absl::string_view outcome, c10d::Store* connection) {
    std::lock_guard lock(mutex);
    if (std::exchange(requested, true)) return;
    note = std::string(absl::StripPrefix(outcome, kRequested));
    if (connection == nullptr) return;
    connection->set(EnteredKey(round, rank), Bytes(absl::StrCat(entered)));
  }

  // The thread has its own `connection`: a connection handles one call at a time, and the training
  // thread may be blocked on its own, waiting for a rank that waits for this thread's answer.
  void Listen(c10d::Store& connection) {
    for (int64_t mine = 0; !abandoned;) {
      std::exception_ptr failure;
      try {
        connection.wait({Key(mine, kDecided)}, wait);
      } catch (const std::exception&) {
        failure = std::current_exception();
      }
      // Perhaps the process is ending, and the store with it: an error's text takes long to make.
      if (abandoned) return;
      const absl::Status waited = CatchStatus("", [&] {
        if (failure) std::rethrow_exception(failure);
      });
      if (absl::IsDeadlineExceeded(waited)) continue;
      bool again = false;
      if (waited.ok()) {  // otherwise rank 0 is gone, and the run with it
        CatchStatus("", [&] {
          const std::string outcome = Text(connection.get(Key(mine, kOutcome)));
          if (!absl::StartsWith(outcome, kRequested)) return;
          Notice(outcome, &connection);
          again = true;
        }).IgnoreError();
      }
      std::unique_lock lock(mutex);
      listens_to = again ? ++mine : std::numeric_limits<int64_t>::max();
      changed.notify_all();
      changed.wait(lock, [&] { return round >= mine || closed || abandoned; });
      if (!again || round < mine) return;
    }
  }

  // Of the round before, once each rank is known to have begun this one.
  void DeleteOldKeys() {
    if (round == 0) return;
    store->deleteKey(EnteredKey(round - 1, rank));
    if (rank != 0) return;
    for (const char* key : {kOutcome, kDecided}) store->deleteKey(Key(round - 1, key));
  }
};

StepAgreement::StepAgreement(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
                             int64_t first_step, std::chrono::milliseconds wait)
    : state_(std::make_shared<State>()) {
  state_->store = std::move(store);
  state_->rank = rank;
  state_->world_size = world_size;
  state_->wait = wait;
  state_->entered = first_step;
  if (!state_->store) return;
  state_->thread = std::thread(
      [state = state_, connection = state_->store->clone()] { state->Listen(*connection); });
}

StepAgreement::~StepAgreement() {
  // c10d prints a stack trace for each thread that waits for a store whose process ends.
  if (!closed_ && state_->store && state_->rank == 0) {
    CatchStatus("", [&] { state_->Decide(kClosed); }).IgnoreError();
  }
  {
    std::lock_guard lock(state_->mutex);
    state_->abandoned = true;
    state_->changed.notify_all();
  }
  if (state_->thread.joinable()) state_->thread.detach();
}

void StepAgreement::Request(absl::string_view note) {
  if (closed_ || is_requested()) return;
  std::string outcome = absl::StrCat(kRequested, note);
  if (state_->store) outcome = state_->Decide(outcome);
  if (!absl::StartsWith(outcome, kRequested)) return;  // the run has ended
  state_->Notice(outcome, state_->store.get());
}

bool StepAgreement::is_requested() const {
  std::lock_guard lock(state_->mutex);
  return state_->requested;
}

std::string StepAgreement::note() const {
  std::lock_guard lock(state_->mutex);
  return state_->note;
}

absl::StatusOr<bool> StepAgreement::Enter(int64_t step) {
  {
    std::lock_guard lock(state_->mutex);
    if (!state_->requested) {
      state_->entered = step;
      return true;
    }
    if (!state_->store) return step <= state_->entered;
  }
  if (!state_->last) {
    int64_t last = 0;
    DDP_RETURN_IF_ERROR(CatchCollective("agreeing on a common step", [&] {
      std::vector<std::string> keys;
      for (int rank = 0; rank < state_->world_size; ++rank) {
        keys.push_back(EnteredKey(state_->round, rank));
      }
      state_->store->wait(keys);
      for (const std::string& key : keys) {
        int64_t entered = 0;
        if (absl::SimpleAtoi(Text(state_->store->get(key)), &entered)) {
          last = std::max(last, entered);
        }
      }
      state_->DeleteOldKeys();
      return absl::OkStatus();
    }));
    state_->last = last;
  }
  return step <= *state_->last;
}

void StepAgreement::Renew(int64_t step) {
  std::unique_lock lock(state_->mutex);
  // Nobody deletes keys of a round that a thread still reads.
  if (state_->store) {
    state_->changed.wait(lock, [&] { return state_->listens_to > state_->round; });
  }
  ++state_->round;
  state_->entered = step;
  state_->requested = false;
  state_->last.reset();
  state_->changed.notify_all();
}

void StepAgreement::Close() {
  if (std::exchange(closed_, true) || !state_->store) return;
  {
    std::lock_guard lock(state_->mutex);
    state_->closed = true;
    state_->changed.notify_all();
  }
  const absl::Status closed = CatchStatus("", [&] { state_->Decide(kClosed); });
  if (closed.ok()) state_->thread.join();
}

}  // namespace ddp::trainer
