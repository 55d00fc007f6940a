#include "tools/bench/collective_server.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "base/status.h"

namespace ddp::tools::bench {
namespace {

// Fills the output, so that elements that a collective does not write are detected.
constexpr int kStale = 0xff;

absl::StatusOr<int> Connect(absl::string_view name) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("the socket's name '", name, "' is too long"));
  }
  // A leading zero byte is what makes the name abstract.
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (fd < 0 || connect(fd, reinterpret_cast<sockaddr*>(&address), size) != 0) {
    const int error = errno;
    if (fd >= 0) close(fd);
    return absl::UnavailableError(absl::StrCat("nobody listens at the abstract socket '", name,
                                               "' (", strerror(error),
                                               "); //tools/bench:collectives starts this program"));
  }
  return fd;
}

absl::Status Verify(const CollectiveTask& task, const Place& place, const Buffers& buffers,
                    Collectives& collectives) {
  const int64_t size = ElementSize(task.dtype);
  for (int64_t i = 0; i < task.iterations; ++i) {
    CollectiveTask fresh = task;
    fresh.seed += static_cast<uint64_t>(i);
    fresh.expected_seed += static_cast<uint64_t>(i);
    std::memset(buffers.output, kStale,
                static_cast<size_t>(OutputElements(task, place.world_size) * size));
    if (task.op != CollectiveOp::kBroadcast || place.rank == 0) {
      Input(fresh, place, fresh.seed).Fill(buffers.input, InputElements(task, place.world_size));
    }
    collectives.Run();
    DDP_RETURN_IF_ERROR(CheckOutput(fresh, place, buffers.output));
  }
  return absl::OkStatus();
}

// Makes one untimed call first, to refill the caches. Repeated in-place sums grow to infinity,
// which does not change their speed.
double Time(const CollectiveTask& task, Collectives& collectives) {
  using Clock = std::chrono::steady_clock;
  collectives.Run();
  collectives.Barrier();
  const Clock::time_point start = Clock::now();
  for (int64_t i = 0; i < task.iterations; ++i) collectives.Run();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

absl::StatusOr<double> Do(absl::string_view line, const Place& place, Collectives& collectives) {
  DDP_ASSIGN_OR_RETURN(CollectiveTask task, ParseTask(line));
  if (task.what == CollectiveTask::Do::kFree) {
    collectives.Free();
    return 0;
  }
  DDP_RETURN_IF_ERROR(Elements(task, place.world_size).status());
  DDP_ASSIGN_OR_RETURN(Buffers buffers, collectives.Prepare(task));
  if (task.what == CollectiveTask::Do::kTime) return Time(task, collectives);
  DDP_RETURN_IF_ERROR(Verify(task, place, buffers, collectives));
  return 0;
}

}  // namespace

absl::Status ServeTasks(absl::string_view control, const Place& place, absl::string_view abilities,
                        Collectives& collectives) {
  DDP_ASSIGN_OR_RETURN(const int fd, Connect(control));
  FILE* in = fdopen(fd, "r");
  FILE* out = fdopen(dup(fd), "w");
  absl::Cleanup closed = [&] {
    if (in != nullptr) fclose(in);
    if (out != nullptr) fclose(out);
  };
  if (in == nullptr || out == nullptr) return absl::InternalError("no stream over the socket");

  absl::FPrintF(out, "rank=%d world_size=%d %s\n", place.rank, place.world_size, abilities);
  fflush(out);
  char line[512];
  while (fgets(line, sizeof(line), in) != nullptr) {
    const absl::StatusOr<double> seconds =
        CatchStatus("collective", [&] { return Do(line, place, collectives); });
    if (seconds.ok()) {
      absl::FPrintF(out, "ok %.9e\n", *seconds);
    } else {
      absl::FPrintF(out, "error rank %d: %s\n", place.rank,
                    absl::StrReplaceAll(seconds.status().message(), {{"\n", "; "}}));
    }
    fflush(out);
  }
  return absl::OkStatus();
}

}  // namespace ddp::tools::bench
