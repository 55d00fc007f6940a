#include "backends/watch/report.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ddp::backends::watch {
namespace {

absl::Status Malformed(absl::string_view line) {
  return absl::InvalidArgumentError(
      absl::StrCat("'", absl::CHexEscape(line), "' is not a line of a rank's report"));
}

// Reads the fields of one line, from left to right.
class Fields {
 public:
  explicit Fields(absl::string_view line) : fields_(absl::StrSplit(line, ' ')) {}

  template <typename Int>
  Fields& Take(Int& value) {
    int64_t wide = 0;
    if (!Next() || !absl::SimpleAtoi(fields_[at_++], &wide)) ok_ = false;
    value = static_cast<Int>(wide);
    return *this;
  }
  Fields& Take(uint64_t& value) {
    if (!Next() || !absl::SimpleAtoi(fields_[at_++], &value)) ok_ = false;
    return *this;
  }
  Fields& TakeText(std::string& value) {
    if (!Next() || !absl::CUnescape(fields_[at_++], &value)) ok_ = false;
    return *this;
  }
  bool ok() const { return ok_; }
  bool AllTaken() const { return ok_ && at_ == fields_.size(); }

 private:
  bool Next() { return ok_ && at_ < fields_.size(); }

  const std::vector<absl::string_view> fields_;
  size_t at_ = 0;
  bool ok_ = true;
};

// Escapes `text` into one field, without spaces.
std::string Quote(absl::string_view text) {
  std::string quoted;
  for (char c : text) absl::StrAppend(&quoted, c == ' ' ? "\\040" : absl::CEscape({&c, 1}));
  return quoted;
}

// Lines: "kind" describes a call (kinds are numbered from 0); "tail" has the first call's number
// and signature; "calls" has the kind of each call; "open" has the number of a call that has not
// ended.
void AppendTail(const std::vector<Recorder::Entry>& tail, std::string& text) {
  if (tail.empty()) return;
  std::vector<CallRecord> kinds;
  std::string calls = "calls";
  std::string open;
  for (const Recorder::Entry& entry : tail) {
    const CallRecord& record = entry.record;
    const auto kind = std::find(kinds.begin(), kinds.end(), record);
    absl::StrAppend(&calls, " ", kind - kinds.begin());
    if (!entry.ended) absl::StrAppend(&open, "open ", entry.number, "\n");
    if (kind != kinds.end()) continue;
    kinds.push_back(record);
    absl::StrAppend(&text, "kind ", static_cast<int>(record.kind), " ", record.reduce_op, " ",
                    record.dtype, " ", record.root, " ", record.numel, " ");
    absl::StrAppend(&text, record.layout, " ", record.tensors, " ", record.same_numel ? 1 : 0,
                    "\n");
  }
  absl::StrAppend(&text, "tail ", tail[0].number, " ", tail[0].signature, "\n", calls, "\n", open);
}

}  // namespace

std::string Encode(const RankReport& report) {
  std::string text =
      absl::StrCat("who ", Quote(report.host), " ", Quote(report.process), " ",
                   Quote(report.probe_address), "\nat ", report.answered_request, " ", report.count,
                   " ", report.signature, " ", report.mark, " ", report.mark_signature, " ",
                   report.idle_ms, " ", report.left ? 1 : 0, " ", report.aborted ? 1 : 0, "\n");
  if (!report.failure.empty()) absl::StrAppend(&text, "failure ", Quote(report.failure), "\n");
  if (report.rounds_begun != 0 || report.has_ended || report.awaited != 0) {
    absl::StrAppend(&text, "thread ", report.waits_in_round, " ", report.rounds_begun, " ",
                    report.has_ended ? 1 : 0, " ", report.awaited, "\n");
  }
  AppendTail(report.tail, text);
  for (const auto& [rank, count] : report.sent) {
    absl::StrAppend(&text, "sent ", rank, " ", count, "\n");
  }
  for (const auto& [rank, count] : report.received) {
    absl::StrAppend(&text, "received ", rank, " ", count, "\n");
  }
  return text;
}

absl::StatusOr<RankReport> Decode(absl::string_view text) {
  RankReport report;
  std::vector<CallRecord> kinds;
  for (absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(line, absl::MaxSplits(' ', 1));
    const absl::string_view what = parts.first;
    Fields fields(parts.second);
    int rank = 0;
    if (what == "who") {
      fields.TakeText(report.host).TakeText(report.process).TakeText(report.probe_address);
    } else if (what == "at") {
      fields.Take(report.answered_request)
          .Take(report.count)
          .Take(report.signature)
          .Take(report.mark);
      fields.Take(report.mark_signature)
          .Take(report.idle_ms)
          .Take(report.left)
          .Take(report.aborted);
    } else if (what == "failure") {
      fields.TakeText(report.failure);
    } else if (what == "thread") {
      fields.Take(report.waits_in_round)
          .Take(report.rounds_begun)
          .Take(report.has_ended)
          .Take(report.awaited);
    } else if (what == "kind") {
      CallRecord& record = kinds.emplace_back();
      uint8_t number = 0;
      fields.Take(number).Take(record.reduce_op).Take(record.dtype).Take(record.root);
      fields.Take(record.numel).Take(record.layout).Take(record.tensors).Take(record.same_numel);
      if (number > static_cast<uint8_t>(CollectiveKind::kRecvAnySource)) return Malformed(line);
      record.kind = static_cast<CollectiveKind>(number);
    } else if (what == "tail") {
      Recorder::Entry& first = report.tail.emplace_back();
      fields.Take(first.number).Take(first.signature);
    } else if (what == "calls") {
      if (report.tail.size() != 1) return Malformed(line);
      for (Recorder::Entry entry = report.tail[0]; !fields.AllTaken(); ++entry.number) {
        size_t kind = 0;
        if (!fields.Take(kind).ok() || kind >= kinds.size()) return Malformed(line);
        entry.record = kinds[kind];
        entry.ended = true;
        if (entry.number == report.tail[0].number) {
          report.tail[0] = entry;
        } else {
          entry.signature = Extend(entry.signature, entry.record);
          report.tail.push_back(entry);
        }
      }
    } else if (what == "open") {
      uint64_t number = 0;
      fields.Take(number);
      if (report.tail.empty() || number - report.tail[0].number >= report.tail.size()) {
        return Malformed(line);
      }
      report.tail[number - report.tail[0].number].ended = false;
    } else if (what == "sent") {
      fields.Take(rank);
      fields.Take(report.sent[rank]);
    } else if (what == "received") {
      fields.Take(rank);
      fields.Take(report.received[rank]);
    } else {
      return Malformed(line);
    }
    if (!fields.AllTaken()) return Malformed(line);
  }
  return report;
}

}  // namespace ddp::backends::watch
