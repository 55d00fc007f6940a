// The interface of metric writers. The trainer has a list of sinks and passes the same data to
// each.
//
//   std::vector<std::unique_ptr<MetricSink>> sinks = …;  // TensorBoardWriter, JsonlWriter
//   for (auto& sink : sinks) {
//     DDP_RETURN_IF_ERROR(sink->Scalars(step, {{"train/loss", loss}, {"train/lr", lr}}));
//   }
//
// Used on one rank only, by convention rank 0. Not collective.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace ddp::trainer::logging {

// One value. Tags are paths such as "train/loss"; TensorBoard groups by the part before the '/'.
struct Metric {
  absl::string_view tag;
  double value = 0;
};

// Thread-compatible. Data may be buffered in memory until Flush or the destructor; a failed call
// loses no earlier data.
class MetricSink {
 public:
  virtual ~MetricSink() = default;

  // Records the values of one training step or one evaluation. Values may be NaN or infinite.
  // Errors name the file; ResourceExhausted if the disk is full.
  virtual absl::Status Scalars(int64_t step, absl::Span<const Metric> metrics) = 0;
  absl::Status Scalars(int64_t step, std::initializer_list<Metric> metrics) {
    return Scalars(step, absl::MakeConstSpan(metrics.begin(), metrics.size()));
  }
  absl::Status Scalar(absl::string_view tag, double value, int64_t step) {
    return Scalars(step, {{tag, value}});
  }

  // Records a Markdown text, such as a table of hyper-parameters.
  virtual absl::Status Text(absl::string_view tag, absl::string_view markdown, int64_t step) = 0;

  // Records the run's options, by path, as it starts: once, before all else. Sinks may leave it
  // out, and do by default; the trainer passes the same as a Text, too.
  virtual absl::Status HyperParameters(
      const std::vector<std::pair<std::string, std::string>>& hyper_parameters) {
    (void)hyper_parameters;
    return absl::OkStatus();
  }

  // Records what has happened to the run at this step, as names and texts. Sinks may leave it out,
  // and do by default.
  virtual absl::Status Event(int64_t,
                             const std::vector<std::pair<std::string, std::string>>& fields) {
    (void)fields;
    return absl::OkStatus();
  }

  // Writes all buffered data to the file; does not fsync.
  virtual absl::Status Flush() = 0;
};

}  // namespace ddp::trainer::logging
