#include "checkpoint/safetensors/tensor_file.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/utf8.h"
#include "base/xxh3.h"

namespace ddp::checkpoint::safetensors {
namespace {

constexpr absl::string_view kHeaderKey = "ddp.header_xxh3";
constexpr absl::string_view kBlocksKey = "ddp.xxh3";
constexpr uint64_t kBlock = uint64_t{1} << 20;
constexpr size_t kDigits = 16;

uint64_t BlocksOf(const TensorEntry& tensor) { return (tensor.size() + kBlock - 1) / kBlock; }

uint64_t BlockSize(const TensorEntry& tensor, uint64_t block) {
  return std::min(kBlock, tensor.size() - block * kBlock);
}

// Position of the header's own digest in `head`, the bytes before the tensors'; npos if it does not
// stand there as it is written. In other text quotation marks are escaped, so it stands there once.
size_t FindDigest(absl::string_view head) {
  const std::string before = absl::StrCat("\"", kHeaderKey, "\":\"");
  const size_t found = head.find(before);
  if (found == absl::string_view::npos) return found;
  const size_t at = found + before.size();
  return head.size() - at < kDigits ? absl::string_view::npos : at;
}

// Of `head` with zeros for the digits at `at`.
std::string DigestOf(std::string head, size_t at) {
  head.replace(at, kDigits, kDigits, '0');
  return HexOf(Xxh3(head));
}

}  // namespace

absl::StatusOr<std::string> WriteTensorFile(const std::string& path,
                                            std::vector<TensorEntry>& tensors, Metadata metadata,
                                            const GiveBytes& give, FileSystem* files) {
  SortForAlignment(tensors);
  const std::string zeros(kDigits, '0');
  metadata[std::string(kHeaderKey)] = zeros;
  // For the places; the text below replaces digits by digits.
  std::string& blocks = metadata[std::string(kBlocksKey)];
  DDP_RETURN_IF_ERROR(WriteHeader(tensors, metadata).status());
  for (const TensorEntry& tensor : tensors) {
    if (tensor.size() == 0) continue;
    DDP_ASSIGN_OR_RETURN(const void* bytes, give(tensor));
    for (uint64_t block = 0; block < BlocksOf(tensor); ++block) {
      blocks +=
          HexOf(Xxh3(static_cast<const char*>(bytes) + block * kBlock, BlockSize(tensor, block)));
    }
  }
  DDP_ASSIGN_OR_RETURN(std::string head, WriteHeader(tensors, metadata));
  const size_t at = FindDigest(head);
  const std::string digest = DigestOf(head, at);
  head.replace(at, kDigits, digest);

  DDP_ASSIGN_OR_RETURN(FileWriter file, FileWriter::Create(path, files));
  DDP_RETURN_IF_ERROR(file.Append(head));
  for (const TensorEntry& tensor : tensors) {
    if (tensor.size() == 0) continue;
    DDP_ASSIGN_OR_RETURN(const void* bytes, give(tensor));
    DDP_RETURN_IF_ERROR(file.Append(bytes, tensor.size()));
  }
  DDP_RETURN_IF_ERROR(file.Finish());
  return digest;
}

absl::StatusOr<TensorFile> TensorFile::Open(const std::string& path) {
  absl::StatusOr<FileReader> reader = FileReader::Open(path);
  if (absl::IsFailedPrecondition(reader.status())) {
    return absl::DataLossError(reader.status().message());  // a folder, a device
  }
  DDP_RETURN_IF_ERROR(reader.status());
  TensorFile file(*std::move(reader));
  std::string head;
  DDP_ASSIGN_OR_RETURN(file.header_, ReadHeader(file.file_, &head));
  for (size_t i = 0; i < file.header_.tensors.size(); ++i) {
    file.by_name_[file.header_.tensors[i].name] = i;
  }
  DDP_RETURN_IF_ERROR(file.TakeChecksums(head));
  return file;
}

absl::Status TensorFile::Damaged(absl::string_view what) const {
  return absl::DataLossError(absl::StrCat(path(), " is damaged: ", what));
}

// A file that has any metadata of ours must have both checksums: damage may have hit the name of
// one.
absl::Status TensorFile::TakeChecksums(absl::string_view head) {
  const bool own = std::any_of(metadata().begin(), metadata().end(), [](const auto& entry) {
    return absl::StartsWith(entry.first, kOwnPrefix);
  });
  if (!own) return absl::OkStatus();
  const auto header = metadata().find(std::string(kHeaderKey));
  const auto blocks = metadata().find(std::string(kBlocksKey));
  const size_t at = FindDigest(head);
  if (header == metadata().end() || blocks == metadata().end() || at == absl::string_view::npos) {
    return Damaged("its header lacks a checksum");
  }
  const std::string digest = DigestOf(std::string(head), at);
  if (head.substr(at, kDigits) != digest) return Damaged("its header does not match its checksum");
  absl::string_view digits = blocks->second;
  for (const TensorEntry& tensor : tensors()) {
    first_checksum_.push_back(checksums_.size());
    for (uint64_t block = 0; block < BlocksOf(tensor); ++block) {
      const std::optional<uint64_t> checksum = DigestOfHex(digits.substr(0, kDigits));
      if (!checksum.has_value()) return Damaged("its checksums do not fit its tensors");
      checksums_.push_back(*checksum);
      digits.remove_prefix(kDigits);
    }
  }
  if (!digits.empty()) return Damaged("its checksums do not fit its tensors");
  digest_ = digest;
  header_.metadata.erase(std::string(kHeaderKey));
  header_.metadata.erase(std::string(kBlocksKey));
  return absl::OkStatus();
}

const TensorEntry* TensorFile::Find(absl::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &header_.tensors[found->second];
}

absl::Status TensorFile::ReadBlock(const TensorEntry& tensor, uint64_t block, void* to) const {
  const uint64_t size = BlockSize(tensor, block);
  DDP_RETURN_IF_ERROR(file_.ReadAt(header_.data_begin + tensor.begin + block * kBlock, to, size));
  const size_t index = static_cast<size_t>(&tensor - header_.tensors.data());
  if (Xxh3(to, size) == checksums_[first_checksum_[index] + block]) return absl::OkStatus();
  return Damaged(absl::StrCat("tensor '", Printable(tensor.name), "' does not match its checksum"));
}

absl::Status TensorFile::Read(const TensorEntry& tensor, uint64_t offset, uint64_t size, void* to) {
  if (offset > tensor.size() || size > tensor.size() - offset) {
    return absl::OutOfRangeError(absl::StrCat(path(), ": bytes ", offset, " and ", size,
                                              " more are not within tensor '",
                                              Printable(tensor.name), "'"));
  }
  if (!is_verified()) return file_.ReadAt(header_.data_begin + tensor.begin + offset, to, size);
  char* out = static_cast<char*>(to);
  const uint64_t end = offset + size;
  while (offset < end) {
    const uint64_t block = offset / kBlock;
    const uint64_t block_begin = block * kBlock;
    const uint64_t block_end = block_begin + BlockSize(tensor, block);
    const uint64_t piece = std::min(end, block_end) - offset;
    if (offset == block_begin && piece == block_end - block_begin) {
      DDP_RETURN_IF_ERROR(ReadBlock(tensor, block, out));
    } else {
      if (kept_at_ != tensor.begin + block_begin) {
        kept_at_ = ~uint64_t{0};
        kept_.resize(block_end - block_begin);
        DDP_RETURN_IF_ERROR(ReadBlock(tensor, block, kept_.data()));
        kept_at_ = tensor.begin + block_begin;
      }
      std::memcpy(out, kept_.data() + (offset - block_begin), piece);
    }
    out += piece;
    offset += piece;
  }
  return absl::OkStatus();
}

}  // namespace ddp::checkpoint::safetensors
