// Simulates a network cable with a given rate and delay between two hosts that are network
// namespaces. Replaces `tc netem`, which many kernels, such as those of CI machines, lack.
//
//   cable --ends=nsA/eth0,nsB/eth0 --gbit_per_s=1 --delay_ms=0.1
//
// Prints "ready" and runs until it is killed. Both namespaces must exist; the interfaces are
// created in them, in state down, and are removed when this process ends. Needs root and
// /dev/net/tun.

#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/log/absl_check.h"
#include "absl/log/absl_log.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

ABSL_FLAG(std::vector<std::string>, ends, {}, "two of NAMESPACE/INTERFACE");
ABSL_FLAG(double, gbit_per_s, 1, "rate in each direction");
ABSL_FLAG(double, delay_ms, 0.1, "delay in each direction, on top of the time that the rate costs");

namespace ddp::network {
namespace {

constexpr size_t kLargestFrame = 70'000;            // 64 KiB of segments that are still to be cut
constexpr int64_t kQueueBytes = int64_t{16} << 20;  // waiting for the wire, in each direction
// Ethernet's preamble, checksum and gap, and the headers that each segment of a large frame
// repeats: Ethernet, IPv4, TCP with time stamps.
constexpr int64_t kFrameOverhead = 24;
constexpr int64_t kHeaders = 14 + 20 + 32;

// A tap interface; this process is its wire.
int OpenEnd(absl::string_view end, const std::string& temporary_name) {
  const std::pair<std::string, std::string> where = absl::StrSplit(end, absl::MaxSplits('/', 1));
  const int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  ABSL_CHECK(fd >= 0) << "/dev/net/tun: " << strerror(errno);
  ifreq request = {};
  temporary_name.copy(request.ifr_name, sizeof(request.ifr_name) - 1);
  request.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
  ABSL_CHECK(ioctl(fd, TUNSETIFF, &request) == 0) << "TUNSETIFF: " << strerror(errno);
  // Segmentation offload gives frames of up to 64 KiB, without which this process could not keep up
  // with 10 Gbit/s.
  ABSL_CHECK(ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) == 0) << strerror(errno);
  const std::string move =
      absl::StrCat("ip link set ", temporary_name, " netns ", where.first, " name ", where.second);
  ABSL_CHECK(system(move.c_str()) == 0) << move;
  return fd;
}

// The header of each frame, as in linux/virtio_net.h, which C++ cannot include.
struct VirtioNetHeader {
  uint8_t flags, gso_type;
  uint16_t header_length, gso_size, checksum_start, checksum_offset;
};
static_assert(sizeof(VirtioNetHeader) == 10);

struct Frame {
  std::vector<char> bytes;  // a VirtioNetHeader, then Ethernet
  absl::Time arrival;
};

int64_t BytesOnWire(const char* data, int64_t size) {
  VirtioNetHeader header;
  std::memcpy(&header, data, sizeof(header));
  const int64_t frame = size - static_cast<int64_t>(sizeof(header));
  int64_t segments = 1;
  if (header.gso_size > 0) {
    segments = (frame - kHeaders + header.gso_size - 1) / header.gso_size;
  }
  return frame + segments * kFrameOverhead + (segments - 1) * kHeaders;
}

class Direction {
 public:
  Direction(int from, int to, double bytes_per_s, absl::Duration delay)
      : from_(from), to_(to), bytes_per_s_(bytes_per_s), delay_(delay) {}

  bool full() const { return queued_ >= kQueueBytes; }
  absl::Time next_arrival() const {
    return frames_.empty() ? absl::InfiniteFuture() : frames_.front().arrival;
  }

  void Take() {
    while (!full()) {
      const ssize_t size = read(from_, buffer_.data(), buffer_.size());
      if (size < 0) {
        // EIO: the interface is down.
        ABSL_CHECK(errno == EAGAIN || errno == EINTR || errno == EIO) << strerror(errno);
        return;
      }
      wire_free_ = std::max(wire_free_, absl::Now()) +
                   absl::Seconds(BytesOnWire(buffer_.data(), size) / bytes_per_s_);
      queued_ += size;
      frames_.push_back({{buffer_.data(), buffer_.data() + size}, wire_free_ + delay_});
    }
  }

  void Deliver() {
    const absl::Time now = absl::Now();
    while (!frames_.empty() && frames_.front().arrival <= now) {
      const std::vector<char>& bytes = frames_.front().bytes;
      // Frames that the other end does not accept are lost, as on a wire. EIO: its interface is
      // down.
      if (write(to_, bytes.data(), bytes.size()) < 0 && errno != EIO) {
        ABSL_LOG_FIRST_N(WARNING, 1) << "a frame is lost: " << strerror(errno);
      }
      queued_ -= static_cast<int64_t>(bytes.size());
      frames_.pop_front();
    }
  }

 private:
  const int from_, to_;
  const double bytes_per_s_;
  const absl::Duration delay_;
  std::array<char, kLargestFrame> buffer_;
  std::deque<Frame> frames_;
  int64_t queued_ = 0;
  absl::Time wire_free_ = absl::InfinitePast();
};

void Run() {
  const std::vector<std::string> ends = absl::GetFlag(FLAGS_ends);
  ABSL_CHECK(ends.size() == 2) << "--ends=NAMESPACE/INTERFACE,NAMESPACE/INTERFACE";
  const double bytes_per_s = absl::GetFlag(FLAGS_gbit_per_s) * 1e9 / 8;
  const absl::Duration delay = absl::Milliseconds(absl::GetFlag(FLAGS_delay_ms));

  // Real-time priority: a wire does not wait for a free core.
  sched_param priority = {};
  priority.sched_priority = 50;
  if (sched_setscheduler(0, SCHED_FIFO, &priority) != 0) {
    ABSL_LOG(WARNING) << "no real-time priority, delays will vary: " << strerror(errno);
  }
  prctl(PR_SET_TIMERSLACK, 1);

  const std::string name = absl::StrCat("cable", getpid());
  const int a = OpenEnd(ends[0], absl::StrCat(name, "a"));
  const int b = OpenEnd(ends[1], absl::StrCat(name, "b"));
  std::puts("ready");
  std::fflush(stdout);
  Direction forth(a, b, bytes_per_s, delay), back(b, a, bytes_per_s, delay);
  for (;;) {
    std::array<pollfd, 2> ready = {
        {{forth.full() ? -1 : a, POLLIN, 0}, {back.full() ? -1 : b, POLLIN, 0}}};
    const absl::Time next = std::min(forth.next_arrival(), back.next_arrival());
    const timespec wait = absl::ToTimespec(std::max(absl::ZeroDuration(), next - absl::Now()));
    ppoll(ready.data(), ready.size(), next == absl::InfiniteFuture() ? nullptr : &wait, nullptr);
    forth.Take();
    back.Take();
    forth.Deliver();
    back.Deliver();
  }
}

}  // namespace
}  // namespace ddp::network

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  ddp::network::Run();
}
