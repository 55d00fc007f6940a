#include "backends/shm/memory/memfd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "backends/shm/memory/memory_limit.h"
#include "base/status.h"

// Since Linux 6.3; older headers lack it.
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace ddp::backends::shm {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

// Maximum size of one fallocate call, so that limits are checked again while other processes
// reserve memory too.
constexpr size_t kReserveStep = size_t{64} << 20;
// A signal makes fallocate undo the whole call. A step of this size takes 0.3 ms, less than the
// tick of a profiler.
constexpr size_t kSmallestReserveStep = size_t{1} << 20;
// Memory that is not reserved: for the processes' own use, and for other processes between their
// check and their reservation.
constexpr uint64_t kReserveMargin = kReserveStep;

size_t PageSize() { return static_cast<size_t>(::sysconf(_SC_PAGESIZE)); }

size_t RoundDown(size_t value, size_t unit) { return value / unit * unit; }

// The remedy for an errno of memfd_create, ftruncate, mmap or fallocate, as text.
std::string Remedy(int error) {
  switch (error) {
    case EMFILE:
    case ENFILE:
      return "; no file descriptor is left: raise `ulimit -n`";
    case ENOSYS:
    case EPERM:
    case EACCES:
      return "; the kernel or a seccomp profile of the container denies it: allow memfd_create and "
             "fallocate there, or use backend=gloo";
    case ENOMEM: {
      rlimit limit = {};
      if (::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
        return absl::StrCat(
            "; address space is limited to ", FormatBytes(limit.rlim_cur),
            ": raise `ulimit -v`, or do without the arena, most of it (shm.arena=false)");
      }
      return "; no address space or memory is left: use a smaller segment (shm.segment_mb)";
    }
    default:
      return "";
  }
}

absl::Status SystemError(int error, absl::string_view what) {
  const absl::Status status = absl::ErrnoToStatus(error, what);
  const bool denied = error == ENOSYS || error == EPERM || error == EACCES;
  return absl::Status(denied ? absl::StatusCode::kFailedPrecondition : status.code(),
                      absl::StrCat(status.message(), Remedy(error)));
}

absl::Status NoMemory(size_t bytes, absl::string_view why) {
  return absl::ResourceExhaustedError(absl::StrCat(
      "cannot reserve ", FormatBytes(bytes), " of shared memory: ", why,
      "; raise the memory limit of the container or job (docker --memory, resources.limits.memory "
      "in Kubernetes, --mem in SLURM), or use a smaller shm.segment_mb, or shm.arena=false"));
}

absl::Status CheckRoom(size_t bytes, size_t asked) {
  const MemoryHeadroom room = AvailableMemory();
  if (room.bytes >= bytes && room.bytes - bytes >= kReserveMargin) return absl::OkStatus();
  return NoMemory(
      asked, absl::StrCat(FormatBytes(room.bytes), " is available in ", room.bound, ", of which ",
                          FormatBytes(kReserveMargin), " is kept for the processes themselves"));
}

}  // namespace

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  SharedMemory old(std::move(*this));
  fd_ = std::move(other.fd_);
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

absl::StatusOr<SharedMemory> SharedMemory::Create(size_t bytes) {
  const size_t page = PageSize();
  if (bytes == 0 || bytes > static_cast<size_t>(PTRDIFF_MAX) - page) {
    return absl::InvalidArgumentError(absl::StrCat("shared memory of ", bytes, " bytes"));
  }
  const size_t size = RoundDown(bytes + page - 1, page);
  const std::string what = absl::StrCat("shared memory of ", FormatBytes(size), ": ");

  // Without MFD_NOEXEC_SEAL newer kernels log a warning or refuse. Older ones return EINVAL for it.
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  UniqueFd fd(::memfd_create("ddp-shm", kFlags | MFD_NOEXEC_SEAL));
  if (!fd.ok() && errno == EINVAL) fd = UniqueFd(::memfd_create("ddp-shm", kFlags));
  if (!fd.ok()) return SystemError(errno, absl::StrCat(what, "memfd_create"));

  // Beyond this limit ftruncate raises SIGXFSZ, which ends the process.
  rlimit limit = {};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      size > limit.rlim_cur) {
    return absl::ResourceExhaustedError(
        absl::StrCat(what, "files, and so memory, are limited to ", FormatBytes(limit.rlim_cur),
                     ": raise `ulimit -f`, or do without the arena, most of it (shm.arena=false)"));
  }
  if (::ftruncate(fd.get(), static_cast<off_t>(size)) != 0) {
    return SystemError(errno, absl::StrCat(what, "ftruncate"));
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals | F_SEAL_SEAL) != 0) {
    return SystemError(errno, absl::StrCat(what, "sealing the size"));
  }
  return MapSealed(std::move(fd), size);
}

absl::StatusOr<SharedMemory> SharedMemory::Map(int raw_fd) {
  UniqueFd fd(raw_fd);
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    return absl::InvalidArgumentError(
        absl::StrCat("descriptor ", raw_fd, " is no memfd of sealed size, so that its owner could ",
                     "shrink it while we read"));
  }
  struct stat status = {};
  if (::fstat(fd.get(), &status) != 0) return SystemError(errno, "shared memory: fstat");
  if (status.st_size <= 0) {
    return absl::InvalidArgumentError(absl::StrCat("descriptor ", raw_fd, " has no memory"));
  }
  return MapSealed(std::move(fd), static_cast<size_t>(status.st_size));
}

absl::StatusOr<SharedMemory> SharedMemory::MapSealed(UniqueFd fd, size_t size) {
  void* data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd.get(),
                      /*offset=*/0);
  if (data == MAP_FAILED) {
    return SystemError(errno, absl::StrCat("mapping shared memory of ", FormatBytes(size)));
  }
  return SharedMemory(std::move(fd), static_cast<std::byte*>(data), size);
}

absl::Status SharedMemory::CheckRange(size_t offset, size_t bytes) const {
  if (offset <= size_ && bytes <= size_ - offset) return absl::OkStatus();
  return absl::OutOfRangeError(
      absl::StrCat(bytes, " bytes at offset ", offset, " of shared memory of ", size_, " bytes"));
}

absl::Status SharedMemory::Reserve(size_t offset, size_t bytes) {
  DDP_RETURN_IF_ERROR(CheckRange(offset, bytes));
  if (bytes == 0) return absl::OkStatus();
  const size_t end = offset + bytes;
  size_t at = RoundDown(offset, PageSize());
  size_t step = kReserveStep;
  while (at < end) {
    DDP_RETURN_IF_ERROR(CheckRoom(end - at, bytes));
    const size_t length = std::min(step, end - at);
    if (::fallocate(fd_.get(), 0, static_cast<off_t>(at), static_cast<off_t>(length)) == 0) {
      at += length;
      continue;
    }
    const int error = errno;
    if (error == EINTR) {
      step = std::max(step / 2, kSmallestReserveStep);
    } else if (error == ENOSPC) {
      // The kernel reports a lack of memory for a memfd as a full disk.
      return NoMemory(bytes,
                      "the kernel has no more to give (vm.overcommit_memory=2, or no free "
                      "memory)");
    } else if (error == ENOMEM) {
      return NoMemory(bytes, "the kernel has no more to give");
    } else {
      return SystemError(error, absl::StrCat("reserving ", FormatBytes(bytes), ": fallocate"));
    }
  }
  return absl::OkStatus();
}

}  // namespace ddp::backends::shm
