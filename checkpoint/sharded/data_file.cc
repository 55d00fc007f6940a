#include "checkpoint/sharded/data_file.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/xxh3.h"

namespace ddp::checkpoint::sharded {
namespace {

// Checksummed and written at once, while it is in the cache.
constexpr size_t kMostPerWrite = 4 * kBlockBytes;

}  // namespace

absl::StatusOr<DataFile> DataFile::Create(const std::string& folder, const std::string& name,
                                          std::vector<safetensors::TensorEntry>& entries,
                                          const safetensors::Metadata& metadata,
                                          FileSystem* files) {
  safetensors::SortForAlignment(entries);
  DDP_ASSIGN_OR_RETURN(const std::string header, safetensors::WriteHeader(entries, metadata));
  DDP_ASSIGN_OR_RETURN(FileWriter file, FileWriter::Create(absl::StrCat(folder, "/", name), files));
  DDP_RETURN_IF_ERROR(file.Append(header));
  StoredFile stored{.name = name, .header_bytes = header.size(), .header_digest = Xxh3(header)};
  return DataFile(std::move(file), std::move(stored));
}

absl::Status DataFile::WriteBlocks(const char* data, size_t size) {
  while (size > 0) {
    const size_t now = std::min(size, kMostPerWrite);
    for (size_t at = 0; at < now; at += kBlockBytes) {
      digests_.push_back(Xxh3(data + at, std::min<size_t>(kBlockBytes, now - at)));
    }
    DDP_RETURN_IF_ERROR(file_.Append(data, now));
    data += now;
    size -= now;
  }
  return absl::OkStatus();
}

absl::Status DataFile::Append(const void* data, size_t size) {
  const char* from = static_cast<const char*>(data);
  if (!pending_.empty()) {
    const size_t more = std::min<size_t>(size, kBlockBytes - pending_.size());
    pending_.insert(pending_.end(), from, from + more);
    from += more;
    size -= more;
    if (pending_.size() < kBlockBytes) return absl::OkStatus();
    DDP_RETURN_IF_ERROR(WriteBlocks(pending_.data(), pending_.size()));
    pending_.clear();
  }
  const size_t whole = size / kBlockBytes * kBlockBytes;
  DDP_RETURN_IF_ERROR(WriteBlocks(from, whole));
  pending_.insert(pending_.end(), from + whole, from + size);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<uint64_t>> DataFile::EndTensor() {
  DDP_RETURN_IF_ERROR(WriteBlocks(pending_.data(), pending_.size()));
  pending_.clear();
  return std::exchange(digests_, {});
}

absl::StatusOr<StoredFile> DataFile::Finish() {
  stored_.bytes = file_.size();
  DDP_RETURN_IF_ERROR(file_.Finish());
  return stored_;
}

}  // namespace ddp::checkpoint::sharded
