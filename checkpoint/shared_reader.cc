#include "checkpoint/shared_reader.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/populate_pages.h"
#include "base/status.h"
#include "checkpoint/crc32.h"

namespace ddp::checkpoint {

absl::Status SharedReader::Read(
    const std::vector<std::pair<const nlohmann::json*, at::Tensor>>& tensors) {
  std::vector<Chunk> chunks;
  for (const auto& [described, tensor] : tensors) {
    char* const bytes = static_cast<char*>(tensor.mutable_data_ptr());
    const size_t size = tensor.nbytes();
    const auto offset = described->at("offset").get<uint64_t>();
    storages_.push_back(
        {described->at("crc").get<uint32_t>(), described->at("damaged").get<std::string>()});
    for (size_t at = 0; at < size; at += kChunkBytes) {
      const size_t length = std::min(kChunkBytes, size - at);
      chunks.push_back({bytes + at, offset + at, length});
      chunks_.push_back({storages_.size() - 1, length});
    }
  }
  for (size_t first = 0; first < chunks.size(); first += size_) {
    const size_t last = std::min(first + size_, chunks.size());
    const size_t mine = first + static_cast<size_t>(ranks_.rank());
    if (mine < last) ReadOne(chunks[mine], chunks_.size() - chunks.size() + mine);
    for (size_t i = first; i < last; ++i) {
      if (i != mine) PopulatePages(chunks[i].to, chunks[i].bytes);
      DDP_RETURN_IF_ERROR(broadcast_(chunks[i].to, chunks[i].bytes, static_cast<int>(i - first)));
    }
  }
  return absl::OkStatus();
}

absl::Status SharedReader::End() {
  if (chunks_.empty()) return absl::OkStatus();
  DDP_RETURN_IF_ERROR(ranks_.Agree(failure_));
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> all, ranks_.AllGather(crcs_));
  std::vector<uint32_t> crcs(chunks_.size());
  for (const std::string& of_rank : all) {
    for (const absl::string_view line : absl::StrSplit(of_rank, '\n', absl::SkipEmpty())) {
      const std::vector<absl::string_view> words = absl::StrSplit(line, ' ');
      size_t chunk = 0;
      uint32_t crc = 0;
      if (words.size() != 2 || !absl::SimpleAtoi(words[0], &chunk) || chunk >= crcs.size() ||
          !absl::SimpleAtoi(words[1], &crc)) {
        return absl::InternalError("a rank's list of CRCs cannot be read");
      }
      crcs[chunk] = crc;
    }
  }
  size_t chunk = 0;
  for (size_t i = 0; i < storages_.size(); ++i) {
    uint32_t crc = 0;
    for (; chunk < chunks_.size() && chunks_[chunk].storage == i; ++chunk) {
      crc = CombineCrc32(crc, crcs[chunk], chunks_[chunk].bytes);
    }
    if (crc != storages_[i].crc) {
      return absl::DataLossError(absl::StrCat(path_, " ", storages_[i].damaged));
    }
  }
  return absl::OkStatus();
}

void SharedReader::ReadOne(const Chunk& chunk, size_t number) {
  if (!failure_.ok()) return;
  failure_ = CatchStatus("", [&]() -> absl::Status {
    if (!file_) {
      DDP_ASSIGN_OR_RETURN(FileReader file, FileReader::Open(path_));
      file_.emplace(std::move(file));
    }
    file_->ReadAhead(chunk.offset, chunk.bytes);  // all of it at once
    return file_->ReadAt(chunk.offset, chunk.to, chunk.bytes);
  });
  absl::StrAppend(&crcs_, number, " ", Crc32(chunk.to, chunk.bytes), "\n");
}

}  // namespace ddp::checkpoint
