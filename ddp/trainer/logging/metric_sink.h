// Where a run's numbers go. The trainer holds a list of sinks and tells each of them the same.
//
//   std::vector<std::unique_ptr<MetricSink>> sinks = …;  // TensorBoardWriter, JsonlWriter
//   for (auto& sink : sinks) {
//     DDP_RETURN_IF_ERROR(sink->Scalars(step, {{"train/loss", loss}, {"train/lr", lr}}));
//   }
//
// Sinks belong to one process: rank 0's, by convention. Nothing here is collective.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace ddp::trainer::logging {

// One number. Tags are paths such as "train/loss": readers group by what stands before the '/'.
struct Metric {
  absl::string_view tag;
  double value = 0;
};

// Thread-compatible. What a call was given may be kept in memory until Flush or the destructor; a
// failed call loses nothing that was given before it.
class MetricSink {
 public:
  virtual ~MetricSink() = default;

  // Records numbers that belong together: one step of training, one evaluation. Values may be NaN
  // or infinite. Errors name the file: ResourceExhausted if the disk is full.
  virtual absl::Status Scalars(int64_t step, absl::Span<const Metric> metrics) = 0;
  absl::Status Scalars(int64_t step, std::initializer_list<Metric> metrics) {
    return Scalars(step, absl::MakeConstSpan(metrics.begin(), metrics.size()));
  }
  absl::Status Scalar(absl::string_view tag, double value, int64_t step) {
    return Scalars(step, {{tag, value}});
  }

  // Records a text in Markdown: hyper-parameters, the command line.
  virtual absl::Status Text(absl::string_view tag, absl::string_view markdown, int64_t step) = 0;

  // Hands everything to the operating system: readers see it from then on.
  virtual absl::Status Flush() = 0;
};

}  // namespace ddp::trainer::logging
