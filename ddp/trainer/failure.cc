#include "ddp/trainer/failure.h"

#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.h"
#include "ddp/collective_status.h"

namespace ddp::trainer {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// This key is in the store once a rank has failed by itself.
constexpr char kNote[] = "trainer/a_rank_has_failed";

// Limits the wait if the store's host is gone, which TCP notices only much later.
constexpr std::chrono::seconds kPatience{3};

bool NoteIsLeft(const StorePtr& store) {
  auto found = std::make_shared<std::promise<bool>>();
  std::future<bool> answer = found->get_future();
  std::thread([store, found] {
    bool left = false;
    CatchStatus("", [&] { left = store->check({kNote}); }).IgnoreError();
    found->set_value(left);
  }).detach();
  return answer.wait_for(kPatience) == std::future_status::ready && answer.get();
}

void LeaveNote(const session::Session& session) {
  CatchStatus("", [&] {
    session.store()->set(kNote, std::vector<uint8_t>{1});
    // `set` is not acknowledged. The check ensures that the key is there before others see the
    // abort.
    session.store()->check({kNote});
  }).IgnoreError();
  CatchStatus("", [&] { session.process_group()->abort(); }).IgnoreError();
}

}  // namespace

absl::Status ShareFailure(const session::Session& session, const absl::Status& mine) {
  if (mine.ok() || !session.store()) return mine;
  if (!IsFromCollective(mine)) {
    LeaveNote(session);
    return session.Agree(mine);
  }
  if (!NoteIsLeft(session.store())) return mine;
  absl::Status cause = session.Agree(absl::OkStatus());
  return cause.ok() ? mine : cause;
}

}  // namespace ddp::trainer
