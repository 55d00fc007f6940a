#include "launchers/local/lines.h"

#include <limits.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace ddp::launchers {

void LineSink::WriteSome() {
  absl::string_view chunk(pending_.data() + begin_, std::min<size_t>(size(), PIPE_BUF));
  if (const size_t newline = chunk.rfind('\n'); newline != absl::string_view::npos) {
    chunk = chunk.substr(0, newline + 1);
  }
  const ssize_t written = write(fd_, chunk.data(), chunk.size());
  if (written < 0) {
    if (errno == EINTR || errno == EAGAIN) return;
    pending_.clear();
    begin_ = 0;
    return;
  }
  begin_ += written;
  // Moving the rest to the front now and then keeps the cost per byte constant.
  if (begin_ > pending_.size() / 2) {
    pending_.erase(0, begin_);
    begin_ = 0;
  }
}

LinePrefixer::LinePrefixer(std::string prefix, LineSink* sink, size_t max_line)
    : prefix_(std::move(prefix)), sink_(sink), max_line_(max_line) {}

void LinePrefixer::Add(absl::string_view text) {
  while (!text.empty()) {
    const size_t newline = text.find('\n');
    if (newline == absl::string_view::npos) {
      const size_t room = max_line_ - partial_.size();
      partial_.append(text.data(), std::min(room, text.size()));
      if (text.size() < room) return;
      text.remove_prefix(room);
      EmitLine("");
    } else {
      EmitLine(text.substr(0, newline));
      text.remove_prefix(newline + 1);
    }
  }
}

void LinePrefixer::Finish() {
  if (!partial_.empty()) EmitLine("");
}

void LinePrefixer::EmitLine(absl::string_view end) {
  sink_->Append(prefix_);
  sink_->Append(partial_);
  sink_->Append(end);
  sink_->Append("\n");
  partial_.clear();
}

}  // namespace ddp::launchers
