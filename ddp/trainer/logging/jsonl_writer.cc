#include "ddp/trainer/logging/jsonl_writer.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/json_number.h"
#include "base/status.h"
#include "ddp/trainer/logging/sink_registry.h"

namespace ddp::trainer::logging {
namespace {

// Keeps the order of keys.
using Json = nlohmann::ordered_json;

Json NewLine(int64_t step) {
  return {{"step", step}, {"time", absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch())}};
}

absl::Status Write(const Json& line, LogFile& file) {
  // Replace invalid UTF-8 by U+FFFD instead of failing the run.
  file.Append(line.dump(-1, ' ', false, Json::error_handler_t::replace));
  file.Append("\n");
  return file.Flush();
}

// The step of a line that Write has written; nullopt for other lines.
std::optional<int64_t> StepOf(absl::string_view line) {
  if (!absl::ConsumePrefix(&line, "{\"step\":")) return std::nullopt;
  int64_t step = 0;
  if (!absl::SimpleAtoi(line.substr(0, line.find_first_of(",}")), &step)) return std::nullopt;
  return step;
}

absl::Status DropStepsFrom(int64_t first, const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path);
  if (absl::IsNotFound(text.status())) return absl::OkStatus();
  DDP_RETURN_IF_ERROR(text.status());
  std::string kept;
  for (absl::string_view rest = *text; !rest.empty();) {
    const size_t end = std::min(rest.find('\n'), rest.size() - 1) + 1;
    const absl::string_view line = rest.substr(0, end);
    rest.remove_prefix(end);
    if (StepOf(line).value_or(first - 1) < first) absl::StrAppend(&kept, line);
  }
  if (kept.size() == text->size()) return absl::OkStatus();
  return WriteFileAtomically(path, kept);
}

absl::StatusOr<std::unique_ptr<MetricSink>> OpenSink(const SinkOptions& options) {
  return JsonlWriter::Open(absl::StrCat(options.log_dir, "/metrics.jsonl"),
                           options.resumed_at_step);
}

const Registration<SinkRegistry> kJsonl("jsonl", &OpenSink);

}  // namespace

absl::StatusOr<std::unique_ptr<JsonlWriter>> JsonlWriter::Open(
    const std::string& path, std::optional<int64_t> resumed_at_step) {
  if (resumed_at_step) DDP_RETURN_IF_ERROR(DropStepsFrom(*resumed_at_step, path));
  DDP_ASSIGN_OR_RETURN(LogFile file, LogFile::Open(path));
  DDP_RETURN_IF_ERROR(file.DropTornLine());
  return std::unique_ptr<JsonlWriter>(new JsonlWriter(std::move(file)));
}

absl::Status JsonlWriter::Scalars(int64_t step, absl::Span<const Metric> metrics) {
  Json line = NewLine(step);
  for (const Metric& metric : metrics) line[std::string(metric.tag)] = ToJson(metric.value);
  return Write(line, file_);
}

absl::Status JsonlWriter::Text(absl::string_view tag, absl::string_view markdown, int64_t step) {
  Json line = NewLine(step);
  line[std::string(tag)] = std::string(markdown);
  return Write(line, file_);
}

absl::Status JsonlWriter::Event(int64_t step,
                                const std::vector<std::pair<std::string, std::string>>& fields) {
  Json line = NewLine(step);
  for (const auto& [name, value] : fields) line[name] = value;
  return Write(line, file_);
}

}  // namespace ddp::trainer::logging
