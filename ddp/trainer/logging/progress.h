// How far a run is, for people: a bar that moves on a terminal, a line now and then elsewhere.
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

// What is shown.
struct ProgressState {
  std::string label;               // "epoch 2/10"
  int64_t step = 0;                // steps done of this label, in [0, steps]
  int64_t steps = 0;               // steps in all
  double examples_per_second = 0;  // 0: not known yet
  std::optional<double> loss = std::nullopt;
  std::optional<absl::Duration> remaining = std::nullopt;
  std::optional<absl::Duration> elapsed =
      std::nullopt;  // set at the end; shown in place of what remains
};

// "epoch 2/10  45% [====>     ] 422/938 loss 0.4213 8.3k examples/s eta 1m05s", in at most
// `columns` columns: the bar shrinks, then disappears, then the end is cut.
std::string FormatBar(const ProgressState& state, int columns);

// "epoch 2/10 step 422/938 loss 0.4213 8.3k examples/s eta 1m05s"
std::string FormatLine(const ProgressState& state);

// "42s", "3m07s", "1h05m", "2d03h". Rounds to whole seconds.
std::string ShortDuration(absl::Duration duration);

// "7.31", "831", "8.3k", "1.2M": three digits at most before a unit, or none.
std::string ShortRate(double per_second);

struct ProgressOptions {
  bool terminal = false;                        // redraw one line in place; else write whole lines
  absl::Duration interval = absl::Seconds(10);  // least time between two outputs
  std::function<int()> columns = [] { return 80; };  // of the terminal, now
  std::function<void(absl::string_view)> write = [](absl::string_view) {
  };  // one call per output, so nothing flickers
  std::function<absl::Time()> now = [] { return absl::Now(); };

  // For an open descriptor: a terminal is redrawn ten times a second at most, in its own width;
  // anything else gets a line every ten seconds. A progress report that cannot be written is no
  // error.
  static ProgressOptions ForDescriptor(int fd);
};

// Thread-compatible. For one process: rank 0's, by convention.
class Progress {
 public:
  explicit Progress(ProgressOptions options);

  // Begins a stretch of `steps` steps of `examples_per_step` examples, over all ranks, of which
  // `done` steps were taken before: by the run that this one goes on from.
  void Begin(std::string label, int64_t steps, int64_t examples_per_step, int64_t done = 0);

  // `step` steps of the stretch are done. Cheap: what is shown changes only when it is due, so it
  // may be called after every step.
  void Update(int64_t step, std::optional<double> loss = std::nullopt);

  // Shows the last state of the stretch and the time it took.
  void End();

  // Writes a line that stays, above the bar where there is one.
  void Print(absl::string_view line);

 private:
  void Show();

  const ProgressOptions options_;
  ProgressState state_;
  int64_t examples_per_step_ = 0;
  absl::Time begun_;
  absl::Time shown_;
  // Where rate and remaining time are measured from: the end of the first step that was reported,
  // as the first steps are slower than the rest.
  std::optional<absl::Time> measured_from_;
  int64_t measured_from_step_ = 0;
};

}  // namespace ddp::trainer::logging
