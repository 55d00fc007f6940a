#include "base/process_limits.h"

#include <sys/resource.h>

#include <cerrno>
#include <future>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/cgroup.h"
#include "base/file.h"

namespace ddp {
namespace {

// Of a std::system_error's number: see StatusFromException (base/status.cc).
constexpr absl::string_view kErrno = "ddp/errno";

// Empty if the file cannot be read.
std::string FirstLine(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadFile(path);
  return text.ok() ? text->substr(0, text->find('\n')) : "";
}

void AddLimit(int resource, rlim_t unit, absl::string_view what, std::vector<std::string>& limits) {
  rlimit limit = {};
  if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  limits.push_back(absl::StrCat(limit.rlim_cur / unit, " ", what));
}

std::vector<std::string> Limits(absl::string_view root) {
  std::vector<std::string> limits;
  AddLimit(RLIMIT_NPROC, 1,
           "processes and threads of this user on the whole machine (RLIMIT_NPROC, `ulimit -u`)",
           limits);
  for (const Cgroup& cgroup : FindCgroups("pids", root)) {
    for (const std::string& folder : cgroup.folders) {
      const std::string file = absl::StrCat(folder, "/pids.max");
      const std::string most = FirstLine(absl::StrCat(root, file));
      if (most.empty() || most == "max") continue;
      limits.push_back(absl::StrCat(most, " in this container or job, with ",
                                    FirstLine(absl::StrCat(root, folder, "/pids.current")),
                                    " in use (", file, ")"));
    }
  }
  AddLimit(RLIMIT_AS, 1 << 20, "MiB of address space, stacks included (RLIMIT_AS, `ulimit -v`)",
           limits);
  limits.push_back(absl::StrCat(FirstLine(absl::StrCat(root, "/proc/sys/kernel/threads-max")),
                                " on the machine (kernel.threads-max)"));
  return limits;
}

}  // namespace

absl::Status NoMoreThreads(absl::string_view what, absl::string_view root) {
  return absl::ResourceExhaustedError(absl::StrCat(
      "the system lets this process start no more ", what,
      "; limits: ", absl::StrJoin(Limits(root), ", "),
      "; raise the one that is reached, or start fewer: lower OMP_NUM_THREADS, the ranks on this "
      "machine or the loader's threads"));
}

absl::Status ExplainThreadLimits(const absl::Status& status) {
  // The number of std::thread's exception.
  if (status.GetPayload(kErrno) != absl::Cord(absl::StrCat(EAGAIN))) return status;
  absl::Status explained(status.code(),
                         absl::StrCat(status.message(), ": ", NoMoreThreads("threads").message()));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    if (url != kErrno) explained.SetPayload(url, payload);  // it is explained once
  });
  return explained;
}

absl::Status TryThreads(int count) {
  std::promise<void> end;
  const std::shared_future<void> ended = end.get_future().share();
  std::vector<std::thread> threads;
  absl::Status status;
  threads.reserve(count);
  try {
    for (int i = 0; i < count; ++i) threads.emplace_back([ended] { ended.wait(); });
  } catch (const std::system_error&) {
    status = NoMoreThreads("threads");
  }
  end.set_value();
  for (std::thread& thread : threads) thread.join();
  return status;
}

absl::Status ReserveFiles(int more, absl::string_view why) {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return absl::OkStatus();
  const absl::StatusOr<std::vector<std::string>> open = ListDirectory("/proc/self/fd");
  if (!open.ok()) return absl::OkStatus();
  const rlim_t needed = open->size() + static_cast<rlim_t>(more);
  if (limit.rlim_cur >= needed) return absl::OkStatus();  // RLIM_INFINITY is the greatest
  const rlim_t soft = limit.rlim_cur;
  limit.rlim_cur = needed;
  if (limit.rlim_max >= needed && setrlimit(RLIMIT_NOFILE, &limit) == 0) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("this process may have ", soft,
                   " files and sockets open (RLIMIT_NOFILE, `ulimit -n`; hard limit ",
                   limit.rlim_max, "), and needs about ", needed, " ", why, ", with ", open->size(),
                   " that are open: raise the limit, or start fewer ranks"));
}

}  // namespace ddp
