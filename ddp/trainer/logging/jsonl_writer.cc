#include "ddp/trainer/logging/jsonl_writer.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status.h"

namespace ddp::trainer::logging {
namespace {

// Keys stay in the order in which they were added.
using Json = nlohmann::ordered_json;

Json NewLine(int64_t step) {
  return {{"step", step}, {"time", absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch())}};
}

Json Number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

absl::Status Write(const Json& line, LogFile& file) {
  // Bytes that are no UTF-8 become U+FFFD: a log must not end a run.
  file.Append(line.dump(-1, ' ', false, Json::error_handler_t::replace));
  file.Append("\n");
  return file.Flush();
}

}  // namespace

absl::StatusOr<std::unique_ptr<JsonlWriter>> JsonlWriter::Open(const std::string& path) {
  DDP_ASSIGN_OR_RETURN(LogFile file, LogFile::Open(path));
  DDP_RETURN_IF_ERROR(file.DropTornLine());
  return std::unique_ptr<JsonlWriter>(new JsonlWriter(std::move(file)));
}

absl::Status JsonlWriter::Scalars(int64_t step, absl::Span<const Metric> metrics) {
  Json line = NewLine(step);
  for (const Metric& metric : metrics) line[std::string(metric.tag)] = Number(metric.value);
  return Write(line, file_);
}

absl::Status JsonlWriter::Text(absl::string_view tag, absl::string_view markdown, int64_t step) {
  Json line = NewLine(step);
  line[std::string(tag)] = std::string(markdown);
  return Write(line, file_);
}

}  // namespace ddp::trainer::logging
