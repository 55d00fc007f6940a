#include "ddp/trainer/logging/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace ddp::trainer::logging {
namespace {

constexpr int kShortestBar = 5;
constexpr int kLongestBar = 40;

// Start and end of a redrawn line: return to the first column, and clear the rest.
constexpr absl::string_view kLineStart = "\r";
constexpr absl::string_view kClearToEnd = "\x1b[K";

std::string FormatLoss(double loss) {
  const double size = std::abs(loss);
  if (std::isnan(loss)) return "nan";  // without its sign, which says nothing
  return absl::StrFormat(loss == 0 || (size >= 1e-3 && size < 1e4) ? "%.4f" : "%.3e", loss);
}

// The text after the counter, in both forms.
std::string Details(const ProgressState& state) {
  std::vector<std::string> parts;
  if (state.loss) parts.push_back(absl::StrCat("loss ", FormatLoss(*state.loss)));
  if (state.examples_per_second > 0) {
    parts.push_back(absl::StrCat(ShortRate(state.examples_per_second), " examples/s"));
  }
  if (state.elapsed) {
    parts.push_back(absl::StrCat("took ", ShortDuration(*state.elapsed)));
  } else if (state.remaining) {
    parts.push_back(absl::StrCat("eta ", ShortDuration(*state.remaining)));
  }
  return parts.empty() ? "" : absl::StrCat(" ", absl::StrJoin(parts, " "));
}

std::string Bar(double fraction, int length) {
  const int done = static_cast<int>(fraction * length);
  std::string bar(done, '=');
  if (done < length) {
    bar += '>';
    bar.resize(length, ' ');
  }
  return absl::StrCat(" [", bar, "]");
}

}  // namespace

std::string FormatBar(const ProgressState& state, int columns) {
  const double fraction =
      state.steps > 0
          ? std::clamp(static_cast<double>(state.step) / static_cast<double>(state.steps), 0.0, 1.0)
          : 0.0;
  const std::string left =
      absl::StrFormat("%s %3d%%", state.label, static_cast<int>(fraction * 100));
  const std::string right = absl::StrCat(" ", state.step, "/", state.steps, Details(state));
  const int brackets = 3;  // " [" and "]"
  const int room = columns - static_cast<int>(left.size() + right.size()) - brackets;
  std::string line = absl::StrCat(
      left, room >= kShortestBar ? Bar(fraction, std::min(room, kLongestBar)) : "", right);
  line.resize(std::min<size_t>(line.size(), std::max(columns, 0)));
  return line;
}

std::string FormatLine(const ProgressState& state) {
  return absl::StrCat(state.label, " step ", state.step, "/", state.steps, Details(state));
}

std::string ShortDuration(absl::Duration duration) {
  if (duration >= absl::Hours(24 * 999)) return "999d+";
  const int64_t seconds =
      std::max<int64_t>(0, absl::ToInt64Seconds(duration + absl::Milliseconds(500)));
  const int64_t minutes = seconds / 60, hours = minutes / 60, days = hours / 24;
  if (days > 0) return absl::StrFormat("%dd%02dh", days, hours % 24);
  if (hours > 0) return absl::StrFormat("%dh%02dm", hours, minutes % 60);
  if (minutes > 0) return absl::StrFormat("%dm%02ds", minutes, seconds % 60);
  return absl::StrFormat("%ds", seconds);
}

std::string ShortRate(double per_second) {
  // Limits from which rounding would reach the next unit.
  if (per_second < 9.995) return absl::StrFormat("%.2f", per_second);
  if (per_second < 999.5) return absl::StrFormat("%.0f", per_second);
  if (per_second < 99'950) return absl::StrFormat("%.1fk", per_second / 1e3);
  if (per_second < 999'500) return absl::StrFormat("%.0fk", per_second / 1e3);
  return absl::StrFormat("%.1fM", per_second / 1e6);
}

ProgressOptions ProgressOptions::ForDescriptor(int fd) {
  ProgressOptions options;
  options.terminal = ::isatty(fd) == 1;
  if (options.terminal) options.interval = absl::Milliseconds(100);
  options.columns = [fd] {
    winsize size{};
    return ::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
  };
  options.write = [fd](absl::string_view text) {
    [[maybe_unused]] const ssize_t written = ::write(fd, text.data(), text.size());
  };
  return options;
}

Progress::Progress(ProgressOptions options) : options_(std::move(options)) {}

void Progress::Begin(std::string label, int64_t steps, int64_t examples_per_step, int64_t done) {
  state_ = ProgressState{.label = std::move(label), .step = done, .steps = steps};
  examples_per_step_ = examples_per_step;
  begun_ = shown_ = options_.now();
  measured_from_.reset();
}

void Progress::Update(int64_t step, std::optional<double> loss) {
  state_.step = step;
  if (loss) state_.loss = loss;
  const absl::Time now = options_.now();
  if (!measured_from_) {
    measured_from_ = now;
    measured_from_step_ = step;
  } else if (step > measured_from_step_ && now > *measured_from_) {
    const absl::Duration per_step = (now - *measured_from_) / (step - measured_from_step_);
    state_.examples_per_second =
        static_cast<double>(examples_per_step_) / absl::ToDoubleSeconds(per_step);
    state_.remaining = per_step * (state_.steps - step);
  }
  if (now - shown_ >= options_.interval) {
    shown_ = now;
    Show();
  }
}

void Progress::End() {
  state_.elapsed = options_.now() - begun_;
  Show();
  if (options_.terminal) options_.write("\n");
}

void Progress::Print(absl::string_view line) {
  options_.write(options_.terminal ? absl::StrCat(kLineStart, line, kClearToEnd, "\n")
                                   : absl::StrCat(line, "\n"));
}

void Progress::Show() {
  if (options_.terminal) {
    // Leave the last column free: a character there makes some terminals start a new line.
    options_.write(
        absl::StrCat(kLineStart, FormatBar(state_, options_.columns() - 1), kClearToEnd));
  } else {
    options_.write(absl::StrCat(FormatLine(state_), "\n"));
  }
}

}  // namespace ddp::trainer::logging
