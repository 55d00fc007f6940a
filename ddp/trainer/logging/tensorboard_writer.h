// Writes metrics to a TensorBoard event file, without TensorFlow.
//
//   DDP_ASSIGN_OR_RETURN(auto writer, TensorBoardWriter::Create({.log_dir = "runs/a"}));
//   DDP_RETURN_IF_ERROR(writer->Scalar("train/loss", 0.5, /*step=*/10));
//   DDP_RETURN_IF_ERROR(writer->Text("hparams", HparamsTable({{"lr", "0.1"}}), 0));
//   // tensorboard --logdir runs
//
// The file is made of TFRecords: length (8 bytes), its masked CRC-32C (4), an Event protobuf, its
// masked CRC-32C (4), little-endian. Source: tensorflow/core/lib/io/record_writer.h
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/trainer/logging/log_file.h"
#include "ddp/trainer/logging/metric_sink.h"

namespace ddp::trainer::logging {

struct TensorBoardOptions {
  std::string log_dir = "";  // created if it is missing

  // The first step of a resumed run. TensorBoard then ignores this step and later ones in earlier
  // event files of the folder.
  std::optional<int64_t> resumed_at_step = std::nullopt;

  // A call writes buffered data to the file if the last flush is this long ago or the data has this
  // size. There is no background thread: nothing is written between calls.
  absl::Duration flush_interval = absl::Seconds(10);
  size_t flush_bytes = 1 << 16;
};

// Writes LOG_DIR/events.out.tfevents.SECONDS.HOST.PID.N with the smallest N, from 0, that is free.
// Values are stored as float32, as TensorBoard's scalars are. Thread-compatible.
class TensorBoardWriter : public MetricSink {
 public:
  // InvalidArgument: empty log_dir. Otherwise errors of base/file.h.
  static absl::StatusOr<std::unique_ptr<TensorBoardWriter>> Create(TensorBoardOptions options);

  using MetricSink::Scalars;
  absl::Status Scalars(int64_t step, absl::Span<const Metric> metrics) override;
  absl::Status Text(absl::string_view tag, absl::string_view markdown, int64_t step) override;
  // Writes values for the tab HParams, where each folder with a run is a session: what is a number
  // or a bool as such, else as text. There is no summary of an experiment, which would have to be
  // the same in all runs: TensorBoard makes it of all sessions in its folder, with every scalar's
  // last value as a metric. The first values of a run that was resumed count.
  absl::Status HyperParameters(
      const std::vector<std::pair<std::string, std::string>>& hyper_parameters) override;
  // Writes, for "run_end" with a reason after which the run does not go on, the end of the session,
  // with success. A session without an end has an unknown status.
  absl::Status Event(int64_t step,
                     const std::vector<std::pair<std::string, std::string>>& fields) override;
  absl::Status Flush() override;

  const std::string& path() const { return file_.path(); }

 private:
  TensorBoardWriter(TensorBoardOptions options, LogFile file);

  absl::Status FlushIfDue();

  const TensorBoardOptions options_;
  LogFile file_;
  absl::Time flushed_at_;
};

// Names and values as a Markdown table, for Text.
std::string HparamsTable(const std::vector<std::pair<std::string, std::string>>& hparams);

namespace internal {

// One TFRecord around `data`.
std::string TfRecord(absl::string_view data);

}  // namespace internal

}  // namespace ddp::trainer::logging
