#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/unique_fd.h"

namespace ddp {

absl::StatusOr<std::shared_ptr<const MappedFile>> MappedFile::Open(const std::string& path) {
  // O_NONBLOCK: opening a named pipe must not wait for its writer.
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info;
  if (!fd.ok() || ::fstat(fd.get(), &info) != 0) return FileError(errno, "opening", path);
  if (!S_ISREG(info.st_mode)) {
    return absl::FailedPreconditionError(path + " is no regular file");
  }
  const auto size = static_cast<size_t>(info.st_size);
  void* data = nullptr;
  if (size > 0) {
    data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd.get(), 0);
    if (data == MAP_FAILED) {
      // With memory left, Linux says so of a process that has as many mappings as it may.
      if (errno == ENOMEM) {
        return absl::ResourceExhaustedError(
            absl::StrCat("mapping ", path,
                         ": no address space, or too many mapped files (`sysctl "
                         "vm.max_map_count`): join files, or raise the limit"));
      }
      return FileError(errno, "mapping", path);
    }
  }
  return std::shared_ptr<const MappedFile>(
      new MappedFile(path, absl::MakeConstSpan(static_cast<const uint8_t*>(data), size)));
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<uint8_t*>(bytes_.data()), bytes_.size());
}

}  // namespace ddp
