// Metrics as JSON Lines: one object per line, for jq, pandas and the like.
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

// One line per call: "step", "time" (seconds since 1970, UTC), then what was given, a text as a
// string. Every line is handed to the operating system at once: a process that is killed loses
// none. JSON has no NaN and no infinities; they are the strings "NaN", "Infinity" and "-Infinity",
// as in protobuf's JSON form. Numbers are written so that they read back exactly.
//
// A file that exists is continued: a resumed run goes on in it.
class JsonlWriter : public MetricSink {
 public:
  // With `resumed_at_step`, as TensorBoardWriterOptions has it: what the file says of that step and
  // later ones is removed, since the run is about to say it again. The file is replaced as a whole.
  static absl::StatusOr<std::unique_ptr<JsonlWriter>> Open(
      const std::string& path, std::optional<int64_t> resumed_at_step = std::nullopt);

  using MetricSink::Scalars;
  absl::Status Scalars(int64_t step, absl::Span<const Metric> metrics) override;
  absl::Status Text(absl::string_view tag, absl::string_view markdown, int64_t step) override;
  absl::Status Flush() override { return file_.Flush(); }

 private:
  explicit JsonlWriter(LogFile file) : file_(std::move(file)) {}

  LogFile file_;
};

}  // namespace ddp::trainer::logging
