#include "backends/watch/report_store.h"

#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace ddp::backends::watch {
namespace {

constexpr char kStatusRequest[] = "status_request";
constexpr char kAbortReason[] = "abort_reason";

absl::string_view Text(const std::vector<uint8_t>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

ReportStore::ReportStore(c10::intrusive_ptr<c10d::Store> store, int size)
    : store_(std::move(store)), reports_(size) {
  for (int rank = 0; rank < size; ++rank) keys_.push_back(absl::StrCat("report/", rank));
}

void ReportStore::Try(const std::function<void()>& request) {
  if (unreachable_) return;
  try {
    request();
  } catch (const std::exception&) {
    unreachable_ = true;
  }
}

void ReportStore::Publish(int rank, const RankReport& report) {
  Try([&] { store_->set(keys_[rank], Encode(report)); });
}

const std::vector<std::optional<RankReport>>& ReportStore::ReadAll() {
  Try([&] {
    std::vector<std::vector<uint8_t>> texts(keys_.size());
    // Check first: reading a key that does not exist yet would wait for it.
    all_published_ = all_published_ || store_->check(keys_);
    if (all_published_ && store_->hasExtendedApi()) {
      texts = store_->multiGet(keys_);
    } else {
      for (size_t rank = 0; rank < keys_.size(); ++rank) {
        if (all_published_ || store_->check({keys_[rank]})) texts[rank] = store_->get(keys_[rank]);
      }
    }
    for (size_t rank = 0; rank < texts.size(); ++rank) Keep(static_cast<int>(rank), texts[rank]);
  });
  return reports_;
}

const std::optional<RankReport>& ReportStore::Read(int rank) {
  Try([&] {
    if (store_->check({keys_[rank]})) Keep(rank, store_->get(keys_[rank]));
  });
  return reports_[rank];
}

void ReportStore::Keep(int rank, const std::vector<uint8_t>& text) {
  if (text.empty()) return;
  absl::StatusOr<RankReport> report = Decode(Text(text));
  if (report.ok()) reports_[rank] = *std::move(report);
}

int64_t ReportStore::LatestRequest() {
  Try([&] { latest_request_ = store_->add(kStatusRequest, 0); });
  return latest_request_;
}

int64_t ReportStore::RequestStatus() {
  Try([&] { latest_request_ = store_->add(kStatusRequest, 1); });
  return latest_request_;
}

std::string ReportStore::SetOnce(const std::string& key, const std::string& value) {
  std::string held = value;
  Try([&] { held = store_->compareSet(key, "", value); });
  return held.empty() ? value : held;
}

std::string ReportStore::SetAbortReason(const std::string& reason) {
  const std::string held = SetOnce(kAbortReason, reason);
  RequestStatus();
  return held;
}

std::optional<std::string> ReportStore::AbortReason() {
  std::optional<std::string> reason;
  Try([&] {
    if (store_->check({kAbortReason})) reason = store_->get_to_str(kAbortReason);
  });
  return reason;
}

bool ReportStore::ClaimStallReport(uint64_t number, int rank) {
  const std::string mine = absl::StrCat(rank);
  const std::string key = absl::StrCat("stall/", number);
  if (SetOnce(key, mine) != mine) return false;
  const std::string last = std::exchange(claimed_, key);
  if (!last.empty() && last != key) Try([&] { store_->deleteKey(last); });
  return true;
}

}  // namespace ddp::backends::watch
