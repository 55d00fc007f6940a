#include "backends/watch/watchdog.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "absl/log/absl_log.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "backends/watch/errors.h"
#include "base/status.h"
#include "c10/util/Exception.h"
#include "torch/csrc/distributed/c10d/Work.hpp"

namespace ddp::backends::watch {
namespace {

constexpr absl::Duration kTick = absl::Milliseconds(100);
// While somebody may be waiting for a rank that is dead, and while the ranks meet.
constexpr absl::Duration kShortTick = absl::Milliseconds(20);
// How long the answers to an alarm may take, so that errors come within half a second; a whole host
// that is gone is known by its silence alone. Large groups look for alarms less often.
constexpr absl::Duration kPatience = absl::Milliseconds(450);
constexpr absl::Duration kRemotePatience = absl::Milliseconds(1400);
// How long ranks hurry to learn of each other's processes and doors. Those who have ended by then
// will not tell.
constexpr absl::Duration kMeeting = absl::Seconds(10);
constexpr absl::Duration kLongestExplanation = absl::Seconds(3);

c10d::Work* AsWork(void* handle) { return static_cast<c10d::Work*>(handle); }
void Acquire(void* handle) { c10::raw::intrusive_ptr::incref(AsWork(handle)); }
void Release(void* handle) { c10::raw::intrusive_ptr::decref(AsWork(handle)); }

bool IsCompleted(void* handle) {
  try {
    return AsWork(handle)->isCompleted();
  } catch (const std::exception&) {
    return true;  // its waiter will hear of it
  }
}

}  // namespace

Watchdog::Watchdog(WatchdogOptions options)
    : options_(std::move(options)),
      beat_(std::clamp(options_.size * absl::Milliseconds(10), absl::Milliseconds(200),
                       absl::Seconds(1))),
      owner_pid_(getpid()),
      collectives_({&Acquire, &Release}),
      messages_({&Acquire, &Release}),
      sent_(options_.size),
      received_(options_.size),
      abort_(std::exchange(options_.abort, nullptr)),
      board_(options_.store, options_.size),
      peers_(options_.host, options_.rank) {
  started_ = advanced_at_ = answered_alarm_at_ = next_beat_ = Clock::now();
}

Watchdog::~Watchdog() {
  if (thread_.joinable()) thread_.detach();
}

absl::Duration Watchdog::Since(Clock::time_point start) {
  return absl::FromChrono(Clock::now() - start);
}

bool Watchdog::InForkedChild() const { return getpid() != owner_pid_; }

void Watchdog::Start() {
  // Before anybody can count on this rank: were it to die now, the others know whose process to
  // look for, and need not wait for an answer.
  Post(/*with_tail=*/false);
  auto self = c10::intrusive_ptr<Watchdog>::reclaim_copy(this);
  thread_ = std::thread([self] { self->Run(); });
}

void Watchdog::Stop() {
  // A forked child has neither the thread nor a right to the parent's connection.
  if (InForkedChild()) return;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (stopping_.exchange(true)) return;
    wake_.notify_all();
    // A store that hangs must not hang us.
    answered_.wait_for(lock, std::chrono::seconds(3), [&] { return finished_; });
    abort_ = nullptr;
    if (!finished_) {
      thread_.detach();
      return;
    }
  }
  thread_.join();
  collectives_.Clear();
  messages_.Clear();
}

void Watchdog::Abort() {
  if (InForkedChild()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    abort_ = nullptr;
  }
  GiveUp("this rank has aborted the group");
  Stop();
}

void Watchdog::CountMessage(bool sent, int peer) {
  if (peer < 0 || peer >= options_.size) return;  // the inner backend refuses it
  (sent ? sent_ : received_)[peer].fetch_add(1, std::memory_order_relaxed);
}

std::exception_ptr Watchdog::Verdict(const std::string& what) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return MakeError(absl::StrCat("rank ", options_.rank, ": ", what, " failed: ", verdict_));
}

std::exception_ptr Watchdog::Explain(const std::exception_ptr& error, const std::string& what,
                                     uint64_t number) {
  const std::string message = Message(error);
  // A backend that sees its peers' processes has named the culprit already, to every rank.
  if (options_.names_dead && absl::StrContains(message, "has died")) {
    if (!options_.is_subgroup) return error;
    // Its numbers are those of the group, whose name says which of the job's these are.
    return MakeError(absl::StrCat(options_.name, ": ", message));
  }
  std::string reason;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!condemned() && !stopping() && !InForkedChild()) {
      if (failure_.empty() && number != 0) failure_ = absl::StrCat(what, ": ", message);
      auto request = std::make_shared<Request>();
      request->number = number;
      requests_.push_back(request);
      wake_.notify_all();
      // The thread keeps to its own patience; this bounds a store that hangs.
      answered_.wait_for(lock, absl::ToChronoMilliseconds(kLongestExplanation),
                         [&] { return request->answered || condemned() || finished_; });
      reason = request->answer;
    }
    if (condemned()) reason = verdict_;
  }
  if (reason.empty()) return error;
  return MakeError(absl::StrCat("rank ", options_.rank, ": ", what, " failed: ", reason, " (",
                                options_.name, ": ", message, ")"));
}

uint64_t Watchdog::OnCondemned(std::function<void()> callback) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!condemned()) {
      callbacks_.emplace(next_callback_, std::move(callback));
      return next_callback_++;
    }
  }
  callback();
  return 0;
}

void Watchdog::Withdraw(uint64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  callbacks_.erase(id);
}

void Watchdog::Run() {
  while (!stopping()) {
    if (!condemned() && Clock::now() >= next_knock_) KnockAtDoors();
    Observe();
    if (Clock::now() >= next_beat_) Beat();
    if (own_door_ != nullptr) own_door_->Answer();
    AnswerRequests();
    if (!condemned()) CheckOldest();
    Sleep(death_seen_ || Meeting() ? kShortTick : kTick);
  }
  Leave();
  AnswerRequests();
  std::lock_guard<std::mutex> lock(mutex_);
  finished_ = true;
  answered_.notify_all();
}

void Watchdog::Sleep(absl::Duration duration) {
  std::unique_lock<std::mutex> lock(mutex_);
  wake_.wait_for(lock, absl::ToChronoNanoseconds(duration),
                 [&] { return stopping() || !requests_.empty(); });
}

// Notes what has come to its end, and since when the oldest of the rest has been seen.
void Watchdog::Observe() {
  const Clock::time_point now = Clock::now();
  if (collectives_.count() != seen_count_) {
    seen_count_ = collectives_.count();
    advanced_at_ = now;
  }
  for (auto [recorder, watched] :
       {std::pair(&collectives_, &oldest_), std::pair(&messages_, &oldest_message_)}) {
    std::optional<Recorder::Pending> oldest;
    for (const Recorder::Pending& pending : recorder->NotEnded()) {
      const bool ended = pending.handle != nullptr && IsCompleted(pending.handle);
      if (ended) recorder->End(pending.number);
      if (pending.handle != nullptr) Release(pending.handle);
      // A Work of gloo's send or recv learns of its completion when it is waited for.
      const bool counts = recorder == &collectives_ || pending.awaited;
      if (!ended && counts && !oldest) oldest = pending;
    }
    if (!oldest) {
      *watched = {};
    } else if (oldest->number != watched->number) {
      *watched = {.number = oldest->number, .since = now};
      if (recorder == &messages_) oldest_message_record_ = oldest->record;
    }
  }
  if (!AwaitsDead()) {
    death_seen_.reset();
  } else if (!death_seen_) {
    death_seen_ = now;
  }
}

bool Watchdog::AwaitsDead() const {
  const std::set<int> dead = peers_.Dead();
  if (dead.empty()) return false;
  if (oldest_.number != 0) return true;
  if (oldest_message_.number == 0) return false;
  const int peer = oldest_message_record_.root;
  return peer == kNoRoot || dead.count(peer) != 0;
}

// While all is well: the store may end with the rank that serves it.
void Watchdog::MeetPeers() {
  const std::vector<std::optional<Report>>& reports = board_.last_read();
  for (int rank = 0; rank < options_.size; ++rank) {
    if (reports[rank]) peers_.Learn(rank, *reports[rank]);
  }
  if (peers_.elsewhere().empty() || !door_.empty()) return;
  // A name was resolved for the store's connections a moment ago.
  if (!options_.store_host.empty()) own_door_ = Door::OfThisProcess(options_.store_host);
  door_ = own_door_ == nullptr ? kNoDoor : own_door_->address();
}

bool Watchdog::Meeting() const {
  const bool met = board_.all_posted() && peers_.know_all_doors();
  return !met && !board_.lost() && Since(started_) < kMeeting;
}

void Watchdog::KnockAtDoors() {
  // At every tick, where the group is small.
  next_knock_ = Clock::now() + absl::ToChronoNanoseconds(beat_ / 2 - kShortTick);
  const auto takes_long = [&](const Watched& watched) {
    return watched.number != 0 && Since(watched.since) > beat_ / 2;
  };
  if (takes_long(oldest_) || takes_long(oldest_message_)) {
    peers_.Knock(peers_.elsewhere());
  } else {
    peers_.Knock(peers_.Untried());
  }
}

// Answers alarms, and lets others compare.
void Watchdog::Beat() {
  AnswerAlarm();
  if (Meeting() || !board_.all_posted()) {
    board_.ReadAll();
    MeetPeers();
  }
  next_beat_ = Clock::now() + absl::ToChronoNanoseconds(Meeting() ? beat_ / 4 : beat_);
  const bool advanced =
      seen_count_ != posted_count_ || collectives_.SignatureAt(seen_count_) != posted_signature_;
  // An answer to an alarm stays one until it has been read.
  const bool asked = answered_alarm_ != 0 && Since(answered_alarm_at_) < 2 * RemotePatience();
  if (advanced || door_ != told_door_) Post(/*with_tail=*/asked);
  // One rank compares for all.
  if (options_.rank != 0 || condemned()) return;
  if (!options_.sees_completion) CheckBehind();
  if (!advanced) return;
  for (const std::optional<Report>& report : board_.ReadAll()) {
    if (report && SignaturesDiffer(collectives_, *report)) {
      Investigate(/*number=*/0, Question::kWhySlow, Patience());
      return;
    }
  }
}

void Watchdog::AnswerAlarm() {
  // The store's client would tell, at length, what is known.
  if (options_.rank_0_serves_store && peers_.Dead().count(0) != 0 && peers_.shut().count(0) == 0) {
    board_.Lose();
  }
  const int64_t alarm = board_.Alarm();
  if (alarm == answered_alarm_) return;
  answered_alarm_ = alarm;
  HearVerdict();
}

// What there is to hear is known when the alarm counts as answered: rank 0, and the store with it,
// may end then.
void Watchdog::HearVerdict() {
  answered_alarm_at_ = Clock::now();
  std::optional<std::string> verdict;
  if (!condemned()) verdict = board_.Verdict();
  Post(/*with_tail=*/true);
  if (verdict) GiveUp(*std::move(verdict));
}

Report Watchdog::Describe(bool with_tail) {
  Report report;
  report.host = peers_.host();
  report.process = peers_.process();
  report.door = door_;
  report.alarm = answered_alarm_;
  report.left = stopping();
  report.idle_ms = absl::ToInt64Milliseconds(Since(advanced_at_));
  // The last call is always told: if this process dies, others can say what it was.
  report.tail = collectives_.Tail(with_tail ? Recorder::kSlots : 1);
  if (!report.tail.empty()) {
    report.count = report.tail.back().number;
    report.signature = report.tail.back().signature;
  }
  report.mark = report.count / Recorder::kMarkEvery * Recorder::kMarkEvery;
  report.mark_signature = collectives_.SignatureAt(report.mark).value_or(0);
  if (with_tail) {
    for (int rank = 0; rank < options_.size; ++rank) {
      if (const uint64_t sent = sent_[rank].load(); sent != 0) report.sent[rank] = sent;
      if (const uint64_t got = received_[rank].load(); got != 0) report.received[rank] = got;
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  report.failure = failure_;
  return report;
}

void Watchdog::Post(bool with_tail) {
  const Report report = Describe(with_tail);
  posted_count_ = report.count;
  posted_signature_ = report.signature;
  told_door_ = report.door;
  board_.Post(options_.rank, report);
}

// The others' answers to the alarm: until all are in or accounted for, or patience ends.
Picture Watchdog::Gather(Question question, absl::Duration patience) {
  const Clock::time_point start = Clock::now();
  const int64_t alarm = answered_alarm_;
  Picture picture;
  picture.rank = options_.rank;
  while (true) {
    picture.reports = board_.ReadAll();
    picture.reports[options_.rank] = Describe(/*with_tail=*/true);
    MeetPeers();
    peers_.Knock(picture.silent);
    picture.dead = peers_.Dead();
    picture.silent.clear();
    for (int rank = 0; rank < options_.size; ++rank) {
      const std::optional<Report>& report = picture.reports[rank];
      if (rank == options_.rank) continue;
      // Without the store nobody can answer: what is known of them is old.
      const bool answered = report && (report->left || (report->alarm >= alarm && !board_.lost()));
      if (peers_.shut().count(rank) != 0) {
        // Where nothing has failed, a firewall may be all there is: a sign of life is waited for.
        if (answered) {
          peers_.Vouch(rank);
          picture.dead.erase(rank);
        } else if (question == Question::kWhySlow) {
          picture.silent.insert(rank);
        }
      } else if (!answered && picture.dead.count(rank) == 0) {
        picture.silent.insert(rank);
      }
    }
    if (picture.silent.empty() || Since(start) >= patience || condemned() || stopping()) break;
    // The dead explain a failure, and those who wait for this answer are in a hurry.
    const bool hurry = question == Question::kWhyFailed || board_.lost();
    if (hurry && !picture.dead.empty()) break;
    AnswerAlarm();
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait_for(lock, std::chrono::milliseconds(5), [&] { return stopping(); });
    if (question == Question::kWhySlow && !requests_.empty()) break;
  }
  return picture;
}

absl::Duration Watchdog::Patience() const { return std::max(kPatience, 1.5 * beat_); }
absl::Duration Watchdog::RemotePatience() const { return std::max(kRemotePatience, 1.5 * beat_); }

Finding Watchdog::Investigate(uint64_t number, Question question, absl::Duration patience) {
  AnswerAlarm();
  if (condemned()) return {};
  // Of ranks that wait for the same collective, one asks for all. After a failure, who answered a
  // moment ago may be dead by now; and an answer must be newer than the knock that found a door
  // shut.
  if (question == Question::kWhyFailed || answered_alarm_ == 0 || !peers_.shut().empty() ||
      Since(answered_alarm_at_) > beat_ / 2) {
    answered_alarm_ = board_.Raise();
    HearVerdict();
    if (condemned()) return {};
  }
  const Picture picture = Gather(question, patience);
  if (condemned()) return {};
  Finding finding = Examine(picture, number, question);
  if (finding.hopeless()) Condemn(finding.text);
  return finding;
}

void Watchdog::AnswerRequests() {
  std::vector<std::shared_ptr<Request>> requests;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    requests.swap(requests_);
  }
  if (requests.empty()) return;
  uint64_t number = 0;
  for (const auto& request : requests) number = std::max(number, request->number);
  Finding finding;
  if (!condemned() && !stopping()) {
    bool remote = false;
    for (const std::optional<Report>& report : board_.last_read()) {
      remote |= report && report->host != peers_.host();
    }
    finding = Investigate(number, Question::kWhyFailed, remote ? RemotePatience() : Patience());
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& request : requests) {
    request->answered = true;
    // That all ranks have made the call explains nothing.
    if (finding.kind != Finding::Kind::kNothing) request->answer = finding.text;
  }
  answered_.notify_all();
}

void Watchdog::Condemn(const std::string& finding) { GiveUp(board_.Condemn(finding)); }

void Watchdog::GiveUp(std::string verdict) {
  std::map<uint64_t, std::function<void()>> callbacks;
  std::function<void()> abort;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (condemned()) return;
    verdict_ = std::move(verdict);
    condemned_.store(true, std::memory_order_release);
    callbacks.swap(callbacks_);
    abort.swap(abort_);
    answered_.notify_all();
  }
  for (const auto& [id, callback] : callbacks) callback();
  for (const Recorder::Pending& pending : messages_.NotEnded()) {
    if (pending.handle == nullptr) continue;
    try {
      AsWork(pending.handle)->abort();
    } catch (const std::exception&) {
      // Not every Work can; the backend's own abort is next.
    }
    Release(pending.handle);
  }
  if (abort) {
    try {
      abort();
    } catch (const std::exception& error) {
      ABSL_LOG(WARNING) << options_.name << ": aborting after a failure: " << error.what();
    }
  }
}

void Watchdog::Leave() {
  seen_count_ = collectives_.count();
  Post(/*with_tail=*/true);
  if (options_.rank != 0 || !options_.rank_0_serves_store) return;
  // What the group is given up for must have been read by all, or each would find a reason of its
  // own, this rank's end among them.
  const bool verdict = condemned() && board_.Verdict().has_value();
  if (condemned() && !verdict) return;
  const int64_t alarm = board_.Alarm();
  const Clock::time_point start = Clock::now();
  // As often as others look for alarms, and somewhat longer.
  const absl::Duration patience = std::max(absl::Seconds(1), beat_ + absl::Milliseconds(400));
  std::set<int> missing;
  while (!board_.lost() && Since(start) < patience) {
    const std::vector<std::optional<Report>>& reports = board_.ReadAll();
    peers_.Knock(missing);
    const std::set<int> dead = peers_.Dead();
    missing.clear();
    for (int rank = 0; rank < options_.size; ++rank) {
      const std::optional<Report>& report = reports[rank];
      const bool knows =
          report && (report->left || (verdict ? report->alarm >= alarm : !report->failure.empty()));
      if (rank != options_.rank && !knows && dead.count(rank) == 0) missing.insert(rank);
    }
    if (missing.empty()) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace ddp::backends::watch
