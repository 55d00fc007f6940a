#include "ddp/trainer/logging/tensorboard_writer.h"

#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <string>

#include "absl/crc/crc32c.h"
#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "base/host_name.h"
#include "base/status.h"
#include "ddp/trainer/logging/event.pb.h"
#include "ddp/trainer/logging/sink_registry.h"

namespace ddp::trainer::logging {
namespace {

template <typename Integer>
std::string LittleEndian(Integer value) {
  std::string bytes;
  for (size_t i = 0; i < sizeof(value); ++i) bytes.push_back(static_cast<char>(value >> 8 * i));
  return bytes;
}

// The format rotates the CRC and adds a constant, because the CRC of data that contains its own CRC
// is weak.
uint32_t MaskedCrc(absl::string_view data) {
  const uint32_t crc = static_cast<uint32_t>(absl::ComputeCrc32c(data));
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8;
}

tensorboard::Event NewEvent(int64_t step) {
  tensorboard::Event event;
  event.set_wall_time(absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()));
  event.set_step(step);
  return event;
}

void Append(const tensorboard::Event& event, LogFile& file) {
  file.Append(internal::TfRecord(event.SerializeAsString()));
}

absl::StatusOr<LogFile> CreateEventFile(const std::string& log_dir) {
  const std::string prefix =
      absl::StrFormat("%s/events.out.tfevents.%010d.%s.%d.", log_dir,
                      absl::ToUnixSeconds(absl::Now()), HostName(), ::getpid());
  for (int n = 0;; ++n) {
    absl::StatusOr<LogFile> file = LogFile::Create(absl::StrCat(prefix, n));
    if (!absl::IsAlreadyExists(file.status())) return file;
  }
}

void SetValue(const std::string& text, tensorboard::SessionStart::Value& value) {
  double number = 0;
  if (text == "true" || text == "false") {
    value.set_boolean(text == "true");
  } else if (absl::SimpleAtod(text, &number) && std::isfinite(number)) {
    value.set_number(number);
  } else {
    value.set_text(text);
  }
}

// An event of the plugin "hparams", whose data are in the metadata; the tensor is empty.
tensorboard::Event HparamsEvent(const char* tag, const tensorboard::HparamsData& data) {
  tensorboard::Event event = NewEvent(0);
  tensorboard::Summary::Value* value = event.mutable_summary()->add_value();
  value->set_tag(tag);
  tensorboard::SummaryMetadata::PluginData* plugin =
      value->mutable_metadata()->mutable_plugin_data();
  plugin->set_plugin_name("hparams");
  plugin->set_content(data.SerializeAsString());
  value->mutable_tensor()->set_dtype(tensorboard::Tensor::FLOAT);
  value->mutable_tensor()->mutable_shape()->add_dimension()->set_size(0);
  return event;
}

absl::StatusOr<std::unique_ptr<MetricSink>> OpenSink(const SinkOptions& options) {
  return TensorBoardWriter::Create(
      {.log_dir = options.log_dir, .resumed_at_step = options.resumed_at_step});
}

const Registration<SinkRegistry> kTensorBoard("tensorboard", &OpenSink);

}  // namespace

namespace internal {

std::string TfRecord(absl::string_view data) {
  const std::string length = LittleEndian(uint64_t{data.size()});
  return absl::StrCat(length, LittleEndian(MaskedCrc(length)), data, LittleEndian(MaskedCrc(data)));
}

}  // namespace internal

absl::StatusOr<std::unique_ptr<TensorBoardWriter>> TensorBoardWriter::Create(
    TensorBoardOptions options) {
  if (options.log_dir.empty()) {
    return absl::InvalidArgumentError("TensorBoardOptions.log_dir is empty");
  }
  DDP_ASSIGN_OR_RETURN(LogFile file, CreateEventFile(options.log_dir));

  tensorboard::Event version = NewEvent(0);
  version.set_file_version("brain.Event:2");
  Append(version, file);
  if (options.resumed_at_step) {
    tensorboard::Event start = NewEvent(*options.resumed_at_step);
    start.mutable_session_log()->set_status(tensorboard::SessionLog::START);
    Append(start, file);
  }
  // Flush now, so that an unwritable folder or a full disk is an error before the first step.
  DDP_RETURN_IF_ERROR(file.Flush());
  return std::unique_ptr<TensorBoardWriter>(
      new TensorBoardWriter(std::move(options), std::move(file)));
}

TensorBoardWriter::TensorBoardWriter(TensorBoardOptions options, LogFile file)
    : options_(std::move(options)), file_(std::move(file)), flushed_at_(absl::Now()) {}

absl::Status TensorBoardWriter::Scalars(int64_t step, absl::Span<const Metric> metrics) {
  tensorboard::Event event = NewEvent(step);
  for (const Metric& metric : metrics) {
    tensorboard::Summary::Value* value = event.mutable_summary()->add_value();
    value->set_tag(std::string(metric.tag));
    value->set_simple_value(static_cast<float>(metric.value));
  }
  Append(event, file_);
  return FlushIfDue();
}

absl::Status TensorBoardWriter::Text(absl::string_view tag, absl::string_view markdown,
                                     int64_t step) {
  tensorboard::Event event = NewEvent(step);
  tensorboard::Summary::Value* value = event.mutable_summary()->add_value();
  value->set_tag(std::string(tag));
  value->mutable_metadata()->mutable_plugin_data()->set_plugin_name("text");
  tensorboard::Tensor* tensor = value->mutable_tensor();
  tensor->set_dtype(tensorboard::Tensor::STRING);
  tensor->mutable_shape()->add_dimension()->set_size(1);
  tensor->add_string_value(std::string(markdown));
  Append(event, file_);
  return FlushIfDue();
}

absl::Status TensorBoardWriter::HyperParameters(
    const std::vector<std::pair<std::string, std::string>>& hyper_parameters) {
  tensorboard::HparamsData data;
  tensorboard::SessionStart& start = *data.mutable_session_start();
  for (const auto& [name, value] : hyper_parameters) {
    tensorboard::SessionStart::Hparam* hparam = start.add_hparam();
    hparam->set_name(name);
    SetValue(value, *hparam->mutable_value());
  }
  start.set_start_time(absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()));
  Append(HparamsEvent("_hparams_/session_start_info", data), file_);
  return FlushIfDue();
}

absl::Status TensorBoardWriter::Event(
    int64_t, const std::vector<std::pair<std::string, std::string>>& fields) {
  const std::map<std::string, std::string> by_name(fields.begin(), fields.end());
  const auto event = by_name.find("event");
  const auto reason = by_name.find("reason");
  if (event == by_name.end() || event->second != "run_end" || reason == by_name.end()) {
    return absl::OkStatus();
  }
  // TensorBoard keeps the first end that it reads: only a run that is over has one, or that a
  // callback has ended, as early stopping does.
  if (reason->second != "end" && reason->second != "max_steps" && reason->second != "callback") {
    return absl::OkStatus();
  }
  tensorboard::HparamsData data;
  data.mutable_session_end()->set_status(tensorboard::SessionEnd::SUCCESS);
  data.mutable_session_end()->set_end_time(absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()));
  Append(HparamsEvent("_hparams_/session_end_info", data), file_);
  return FlushIfDue();
}

absl::Status TensorBoardWriter::Flush() {
  flushed_at_ = absl::Now();
  return file_.Flush();
}

absl::Status TensorBoardWriter::FlushIfDue() {
  const bool due = file_.pending() >= options_.flush_bytes ||
                   absl::Now() - flushed_at_ >= options_.flush_interval;
  return due ? Flush() : absl::OkStatus();
}

std::string HparamsTable(const std::vector<std::pair<std::string, std::string>>& hparams) {
  std::string table = "| name | value |\n| --- | --- |\n";
  const auto cell = [](absl::string_view text) {
    return absl::StrReplaceAll(text, {{"|", "\\|"}, {"\n", " "}});
  };
  for (const auto& [name, value] : hparams) {
    absl::StrAppend(&table, "| ", cell(name), " | ", cell(value), " |\n");
  }
  return table;
}

}  // namespace ddp::trainer::logging
