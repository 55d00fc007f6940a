// For tests: a forked child process that returns a text, and can be killed.
//
//   ChildProcess child([&] { return Work().ToString(); });
//   EXPECT_EQ(child.Result(), "OK");
#pragma once

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <string>

#include "absl/log/absl_check.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/unique_fd.h"

namespace ddp::backends {

// Messages between a process and its child, in both directions. Thread-compatible.
class Messages {
 public:
  Messages() {
    int ends[2];
    ABSL_CHECK_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    parent_ = UniqueFd(ends[0]);
    child_ = UniqueFd(ends[1]);
  }
  // The caller calls one of these after fork. Each process keeps one end open only, so that it is
  // told when the other process ends.
  void BecomeChild() { parent_ = UniqueFd(); }
  void BecomeParent() { child_ = UniqueFd(); }

  void Send(absl::string_view text) {
    ABSL_CHECK_EQ(::send(end(), text.data(), text.size(), MSG_NOSIGNAL),
                  static_cast<ssize_t>(text.size()));
  }
  // Blocks. Empty if the other process has ended.
  std::string Receive() {
    std::string text(1 << 16, '\0');
    const ssize_t n = ::recv(end(), text.data(), text.size(), 0);
    text.resize(n > 0 ? static_cast<size_t>(n) : 0);
    return text;
  }

 private:
  int end() const { return parent_.ok() ? parent_.get() : child_.get(); }

  UniqueFd parent_;
  UniqueFd child_;
};

// The destructor kills the process and waits for it. Thread-compatible.
class ChildProcess {
 public:
  // Runs `body` in the child, with the child's end of channel(); its return value is Result().
  explicit ChildProcess(const std::function<std::string(Messages&)>& body) : pid_(::fork()) {
    ABSL_CHECK_GE(pid_, 0);
    if (pid_ > 0) {
      channel_.BecomeParent();
      return;
    }
    channel_.BecomeChild();
    // An empty message would mean that the child has ended, so each result gets a prefix.
    channel_.Send(absl::StrCat("=", body(channel_)));
    ::_exit(0);
  }
  explicit ChildProcess(const std::function<std::string()>& body)
      : ChildProcess([&body](Messages&) { return body(); }) {}
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  ~ChildProcess() {
    Kill();
    Reap();
  }

  pid_t pid() const { return pid_; }
  Messages& channel() { return channel_; }

  // Sends SIGKILL. Returns when the process has ended; it remains a zombie until Reap.
  void Kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    siginfo_t info;
    ABSL_CHECK_EQ(::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT), 0);
  }
  // Waits until the process has ended, and frees its id. Returns its wait status.
  int Reap() {
    int status = 0;
    if (pid_ > 0) ABSL_CHECK_EQ(::waitpid(pid_, &status, 0), pid_);
    pid_ = 0;
    return status;
  }
  // Waits for the return value of the body; otherwise describes how the process ended.
  std::string Result() {
    const std::string said = channel_.Receive();
    const int status = Reap();
    if (WIFSIGNALED(status)) return absl::StrCat("killed by signal ", WTERMSIG(status));
    return said.empty() ? "no result" : said.substr(1);
  }

 private:
  Messages channel_;
  pid_t pid_;
};

}  // namespace ddp::backends
