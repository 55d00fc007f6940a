#include "backends/watch/board.h"

#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace ddp::backends::watch {
namespace {

constexpr char kAlarm[] = "alarm";
constexpr char kVerdict[] = "verdict";

absl::string_view Text(const std::vector<uint8_t>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

Board::Board(c10::intrusive_ptr<c10d::Store> store, int size)
    : store_(std::move(store)), reports_(size) {
  for (int rank = 0; rank < size; ++rank) keys_.push_back(absl::StrCat("at/", rank));
}

void Board::Try(const std::function<void()>& request) {
  if (lost_) return;
  try {
    request();
  } catch (const std::exception&) {
    lost_ = true;
  }
}

void Board::Post(int rank, const Report& report) {
  Try([&] { store_->set(keys_[rank], Encode(report)); });
}

const std::vector<std::optional<Report>>& Board::ReadAll() {
  Try([&] {
    std::vector<std::vector<uint8_t>> texts(keys_.size());
    // A store waits for a key that is not there yet; this must not.
    all_posted_ = all_posted_ || store_->check(keys_);
    if (all_posted_ && store_->hasExtendedApi()) {
      texts = store_->multiGet(keys_);
    } else {
      for (size_t rank = 0; rank < keys_.size(); ++rank) {
        if (all_posted_ || store_->check({keys_[rank]})) texts[rank] = store_->get(keys_[rank]);
      }
    }
    for (size_t rank = 0; rank < texts.size(); ++rank) {
      if (texts[rank].empty()) continue;
      absl::StatusOr<Report> report = Decode(Text(texts[rank]));
      if (report.ok()) reports_[rank] = *std::move(report);
    }
  });
  return reports_;
}

int64_t Board::Alarm() {
  Try([&] { alarm_ = store_->add(kAlarm, 0); });
  return alarm_;
}

int64_t Board::Raise() {
  Try([&] { alarm_ = store_->add(kAlarm, 1); });
  return alarm_;
}

std::string Board::SetOnce(const std::string& key, const std::string& value) {
  std::string held = value;
  Try([&] { held = store_->compareSet(key, "", value); });
  return held.empty() ? value : held;
}

std::string Board::Condemn(const std::string& verdict) {
  const std::string held = SetOnce(kVerdict, verdict);
  Raise();
  return held;
}

std::optional<std::string> Board::Verdict() {
  std::optional<std::string> verdict;
  Try([&] {
    if (store_->check({kVerdict})) verdict = store_->get_to_str(kVerdict);
  });
  return verdict;
}

bool Board::ClaimStall(uint64_t number, int rank) {
  const std::string mine = absl::StrCat(rank);
  return SetOnce(absl::StrCat("stall/", number), mine) == mine;
}

}  // namespace ddp::backends::watch
