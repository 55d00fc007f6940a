#include "ddp/session/failure.h"

#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "base/status.h"
#include "ddp/collective_status.h"

namespace ddp::session {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// In the store once a rank has failed by itself.
constexpr char kFailureKey[] = "session/a_rank_has_failed";

// Maximum wait for the store, whose host may be gone: TCP notices that only much later.
constexpr std::chrono::seconds kStorePatience{3};

// Maximum wait of a failed rank for ranks that neither communicate nor end. Then it ends, and its
// launcher ends the job.
constexpr absl::Duration kRanksPatience = absl::Seconds(10);

bool AnyRankHasFailed(const StorePtr& store) {
  auto found = std::make_shared<std::promise<bool>>();
  std::future<bool> answer = found->get_future();
  std::thread([store, found] {
    bool has_failed = false;
    CatchStatus("", [&] { has_failed = store->check({kFailureKey}); }).IgnoreError();
    found->set_value(has_failed);
  }).detach();
  return answer.wait_for(kStorePatience) == std::future_status::ready && answer.get();
}

void StopOtherRanks(c10d::Store& store, c10d::ProcessGroup& process_group) {
  CatchStatus("", [&] {
    store.set(kFailureKey, std::vector<uint8_t>{1});
    // `set` is not acknowledged. The check ensures that the key is there before others see the
    // abort.
    store.check({kFailureKey});
  }).IgnoreError();
  CatchStatus("", [&] { process_group.abort(); }).IgnoreError();
}

}  // namespace

absl::Status ShareFailure(const StoreCoordinator& ranks, const StorePtr& store,
                          c10d::ProcessGroup& process_group, const absl::Status& mine) {
  if (IsFromCoordinator(mine)) return mine;
  const bool from_collective = IsFromCollective(mine);
  // The codes of failed communication, for bodies that do not use CatchCollective.
  if (from_collective || absl::IsUnavailable(mine) || absl::IsDeadlineExceeded(mine)) {
    if (AnyRankHasFailed(store)) {
      // Some rank may be dead, or work alone.
      absl::Status cause = ranks.AgreeOnFailure(absl::OkStatus(), kRanksPatience);
      return WasAnnounced(cause) ? cause : mine;
    }
    if (from_collective) return mine;
  }
  StopOtherRanks(*store, process_group);
  return ranks.AgreeOnFailure(mine, kRanksPatience);
}

}  // namespace ddp::session
