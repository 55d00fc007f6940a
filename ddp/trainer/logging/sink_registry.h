// The kinds of metric sinks, by name, of which `log.sinks` chooses.
//
//   absl::StatusOr<std::unique_ptr<MetricSink>> Open(const SinkOptions& options);
//   const ddp::Registration<SinkRegistry> kMine("mine", &Open);  // in the sink's .cc
//
// The target of that .cc has `alwayslink = True`.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/registry.h"
#include "ddp/trainer/logging/metric_sink.h"

namespace ddp::trainer::logging {

struct SinkOptions {
  std::string log_dir;  // not empty; may not exist yet
  // The first step of a resumed run. What has been recorded for this step and later ones is
  // obsolete. A sink that was opened for the run before it is destroyed after this one is opened.
  std::optional<int64_t> resumed_at_step = std::nullopt;
};

struct SinkRegistryTag {
  static constexpr absl::string_view kWhat = "log sink";
};

// Called on the rank that writes logs, when a run starts, and again when it has been resumed.
// Errors name the file and end the run.
using SinkRegistry =
    Registry<absl::StatusOr<std::unique_ptr<MetricSink>> (*)(const SinkOptions&), SinkRegistryTag>;

}  // namespace ddp::trainer::logging
