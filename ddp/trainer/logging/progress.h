// Progress output: a bar that is redrawn on a terminal, otherwise a line at intervals.
//
//   Progress progress(ProgressOptions::ForDescriptor(STDERR_FILENO));
//   progress.Begin("epoch 1/5", /*steps=*/938, /*examples_per_step=*/64);
//   for (int64_t step = 1; step <= 938; ++step) progress.Update(step, loss);
//   progress.End();
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace ddp::trainer::logging {

// The values to show.
struct ProgressState {
  std::string label;               // "epoch 2/10"
  int64_t step = 0;                // steps done, in [0, steps]
  int64_t steps = 0;               // total steps
  double examples_per_second = 0;  // 0: unknown
  std::optional<double> loss = std::nullopt;
  std::optional<absl::Duration> remaining = std::nullopt;
  std::optional<absl::Duration> elapsed =
      std::nullopt;  // set at the end; shown instead of `remaining`
};

// "epoch 2/10  45% [====>     ] 422/938 loss 0.4213 8.3k examples/s eta 1m05s", in at most
// `columns` columns: the bar shrinks, then disappears, then the text is cut off.
std::string FormatBar(const ProgressState& state, int columns);

// "epoch 2/10 step 422/938 loss 0.4213 8.3k examples/s eta 1m05s"
std::string FormatLine(const ProgressState& state);

// "42s", "3m07s", "1h05m", "2d03h". Rounds to whole seconds.
std::string ShortDuration(absl::Duration duration);

// "7.31", "831", "8.3k", "1.2M".
std::string ShortRate(double per_second);

struct ProgressOptions {
  bool terminal = false;                             // redraw one line in place; else write lines
  absl::Duration interval = absl::Seconds(10);       // minimum time between two outputs
  std::function<int()> columns = [] { return 80; };  // current width
  std::function<void(absl::string_view)> write = [](absl::string_view) {
  };  // one call per output, so nothing flickers
  std::function<absl::Time()> now = [] { return absl::Now(); };

  // Options for output to an open descriptor: a terminal is redrawn at most ten times per second,
  // in its width; anything else gets a line every ten seconds. Write errors are ignored.
  static ProgressOptions ForDescriptor(int fd);
};

// Thread-compatible. Used on one rank only, by convention rank 0.
class Progress {
 public:
  explicit Progress(ProgressOptions options);

  // Begins a phase, such as an epoch, of `steps` steps of `examples_per_step` examples over all
  // ranks. `done`: how many of these steps an earlier run, from which this one was resumed, has
  // taken.
  void Begin(std::string label, int64_t steps, int64_t examples_per_step, int64_t done = 0);

  // `step` steps of the phase are done. Cheap enough for every step: writes only at intervals.
  void Update(int64_t step, std::optional<double> loss = std::nullopt);

  // Shows the final state of the phase and its duration.
  void End();

  // Writes a permanent line, above the bar if there is one.
  void Print(absl::string_view line);

 private:
  void Show();

  const ProgressOptions options_;
  ProgressState state_;
  int64_t examples_per_step_ = 0;
  absl::Time begun_;
  absl::Time shown_;
  // Start of the measurement of rate and remaining time: the end of the first reported step, since
  // the first steps are slower.
  std::optional<absl::Time> measured_from_;
  int64_t measured_from_step_ = 0;
};

}  // namespace ddp::trainer::logging
