#include "ddp/trainer/stop.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "ddp/collective_status.h"

namespace ddp::trainer {
namespace {

// Has one of the next two values: the one that was set first.
constexpr char kOutcome[] = "outcome";
constexpr char kRequested[] = "requested";
constexpr char kClosed[] = "closed";
// Set after kOutcome. Needed because in some stores compareSet does not wake waiters.
constexpr char kDecided[] = "decided";

std::vector<uint8_t> Bytes(absl::string_view text) { return {text.begin(), text.end()}; }

std::string Text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

std::string EnteredKey(int rank) { return absl::StrCat("entered/", rank); }

}  // namespace

struct StopAgreement::State {
  c10::intrusive_ptr<c10d::Store> store;
  int rank;
  int world_size;
  std::chrono::milliseconds wait;
  std::atomic<bool> abandoned{false};
  std::thread thread;

  std::mutex mutex;
  // Guarded by mutex.
  int64_t entered;
  bool requested = false;  // this rank knows of a request: `entered` is final

  // Used by the training thread only.
  std::optional<int64_t> last;

  // Sets the outcome, if it is not set, and returns it.
  std::string Decide(const char* value) {
    const std::string outcome = Text(store->compareSet(kOutcome, Bytes(""), Bytes(value)));
    store->set(kDecided, Bytes("1"));
    return outcome;
  }

  // `connection`: null with a world size of 1.
  void Notice(c10d::Store* connection) {
    std::lock_guard lock(mutex);
    if (std::exchange(requested, true) || connection == nullptr) return;
    connection->set(EnteredKey(rank), Bytes(absl::StrCat(entered)));
  }

  // The thread has its own `connection`: a connection handles one call at a time, and the training
  // thread may be blocked on its own, waiting for a rank that waits for this thread's answer.
  void Listen(c10d::Store& connection) {
    while (!abandoned) {
      absl::Status waited = CatchStatus("", [&] { connection.wait({kDecided}, wait); });
      if (absl::IsDeadlineExceeded(waited)) continue;
      if (!waited.ok()) return;  // rank 0 is gone, and the run with it
      CatchStatus("", [&] {
        if (Text(connection.get(kOutcome)) == kRequested) Notice(&connection);
      }).IgnoreError();
      return;
    }
  }
};

StopAgreement::StopAgreement(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
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

StopAgreement::~StopAgreement() {
  state_->abandoned = true;
  if (state_->thread.joinable()) state_->thread.detach();
}

void StopAgreement::Request() {
  if (state_->store && state_->Decide(kRequested) != kRequested) return;  // the run has ended
  state_->Notice(state_->store.get());
}

absl::StatusOr<bool> StopAgreement::Enter(int64_t step) {
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
    DDP_RETURN_IF_ERROR(CatchCollective("agreeing on the last step", [&] {
      std::vector<std::string> keys;
      for (int rank = 0; rank < state_->world_size; ++rank) keys.push_back(EnteredKey(rank));
      state_->store->wait(keys);
      for (const std::string& key : keys) {
        int64_t entered = 0;
        if (absl::SimpleAtoi(Text(state_->store->get(key)), &entered)) {
          last = std::max(last, entered);
        }
      }
      return absl::OkStatus();
    }));
    state_->last = last;
  }
  return step <= *state_->last;
}

void StopAgreement::Close() {
  if (std::exchange(closed_, true) || !state_->store) return;
  const absl::Status closed = CatchStatus("", [&] { state_->Decide(kClosed); });
  if (closed.ok()) state_->thread.join();
}

}  // namespace ddp::trainer
