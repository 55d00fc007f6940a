// Writes metrics as JSON Lines: one object per line, for jq, pandas and so on.
//
//   DDP_ASSIGN_OR_RETURN(auto writer, JsonlWriter::Open("run/metrics.jsonl"));
//   DDP_RETURN_IF_ERROR(writer->Scalars(10, {{"train/loss", 0.5}, {"train/lr", 0.1}}));
//   // {"step":10,"time":1700000000.25,"train/loss":0.5,"train/lr":0.1}
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "ddp/trainer/logging/log_file.h"
#include "ddp/trainer/logging/metric_sink.h"

namespace ddp::trainer::logging {

// One line per call: "step", "time" (seconds since 1970, UTC), then the metrics, or the text as a
// string. Each line is written with a system call at once, so a killed process loses none. NaN and
// infinities are the strings "NaN", "Infinity" and "-Infinity", as in protobuf's JSON format.
// Numbers read back exactly.
//
// Appends to an existing file. Thread-compatible.
class JsonlWriter : public MetricSink {
 public:
  // With `resumed_at_step`, the first step of a resumed run, atomically removes the lines of this
  // step and later ones. Creates missing folders, and removes an unfinished last line. Errors of
  // base/file.h.
  static absl::StatusOr<std::unique_ptr<JsonlWriter>> Open(
      const std::string& path, std::optional<int64_t> resumed_at_step = std::nullopt);

  using MetricSink::Scalars;
  absl::Status Scalars(int64_t step, absl::Span<const Metric> metrics) override;
  absl::Status Text(absl::string_view tag, absl::string_view markdown, int64_t step) override;
  absl::Status Event(int64_t step,
                     const std::vector<std::pair<std::string, std::string>>& fields) override;
  absl::Status Flush() override { return file_.Flush(); }

 private:
  explicit JsonlWriter(LogFile file) : file_(std::move(file)) {}

  LogFile file_;
};

}  // namespace ddp::trainer::logging
