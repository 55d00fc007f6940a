#include "tools/datasets/token_files.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/mapped_file.h"
#include "base/status.h"
#include "tools/datasets/plain_file.h"

namespace ddp::tools::datasets {
namespace {

int64_t BytesOf(TokenType type) {
  return type == TokenType::kBytes ? 1 : type == TokenType::kUint16 ? 2 : 4;
}

// The files of a path.
absl::StatusOr<std::vector<std::string>> FilesOf(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) return FileError(error ? error.value() : ENOENT, "opening", path);
  if (!fs::is_directory(status)) return std::vector<std::string>{path};
  std::vector<std::string> files;
  // Of the folders that the entry is in, to which a link in them must not lead back.
  std::vector<fs::path> above = {fs::canonical(path, error)};
  fs::recursive_directory_iterator entries(path, fs::directory_options::follow_directory_symlink,
                                           error);
  for (; !error && entries != fs::recursive_directory_iterator(); entries.increment(error)) {
    const bool is_hidden = entries->path().filename().string().starts_with('.');
    above.resize(static_cast<size_t>(entries.depth()) + 1);
    if (entries->is_directory(error)) {
      above.push_back(fs::canonical(entries->path(), error));
      if (is_hidden || std::find(above.begin(), above.end() - 1, above.back()) != above.end() - 1) {
        entries.disable_recursion_pending();
      }
    } else if (!is_hidden) {
      error.clear();  // of a link that leads nowhere: Open names it
      files.push_back(entries->path().string());
    }
  }
  if (error) return FileError(error.value(), "reading folder", path);
  if (files.empty()) {
    return absl::NotFoundError(absl::StrCat("folder ", path, " has no files"));
  }
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

absl::StatusOr<TokenFiles> TokenFiles::Open(const std::vector<std::string>& paths, TokenType type) {
  TokenFiles opened;
  opened.type_ = type;
  for (const std::string& given : paths) {
    DDP_ASSIGN_OR_RETURN(const std::vector<std::string> files, FilesOf(given));
    for (const std::string& path : files) {
      DDP_ASSIGN_OR_RETURN(const std::shared_ptr<const MappedFile> file, MappedFile::Open(path));
      const auto bytes = static_cast<int64_t>(file->bytes().size());
      const absl::string_view contents(reinterpret_cast<const char*>(file->bytes().data()),
                                       file->bytes().size());
      if (const absl::string_view problem =
              NoPlainFile(path, contents, /*is_text=*/type == TokenType::kBytes);
          !problem.empty()) {
        return absl::InvalidArgumentError(absl::StrCat(path, " ", problem));
      }
      if (bytes % BytesOf(type) != 0) {
        return absl::InvalidArgumentError(absl::StrCat(path, " has ", bytes,
                                                       " bytes, no whole number of tokens of ",
                                                       BytesOf(type), " bytes"));
      }
      if (bytes == 0) continue;
      opened.files_.push_back(file);
      opened.starts_.push_back(opened.starts_.back() + bytes / BytesOf(type));
    }
  }
  return opened;
}

template <typename Visit>
void TokenFiles::ForEachPart(int64_t begin, int64_t end, const Visit& visit) const {
  auto file = std::upper_bound(starts_.begin(), starts_.end(), begin) - starts_.begin() - 1;
  while (begin < end) {
    const int64_t stop = std::min(end, starts_[file + 1]), skipped = begin - starts_[file];
    const void* const data = files_[file]->bytes().data();
    switch (type_) {
      case TokenType::kBytes:
        visit(static_cast<const uint8_t*>(data) + skipped, stop - begin, begin);
        break;
      case TokenType::kUint16:
        visit(static_cast<const uint16_t*>(data) + skipped, stop - begin, begin);
        break;
      case TokenType::kUint32:
        visit(static_cast<const uint32_t*>(data) + skipped, stop - begin, begin);
        break;
    }
    begin = stop;
    ++file;
  }
}

void TokenFiles::Read(int64_t begin, int64_t n, int64_t* to) const {
  ForEachPart(begin, begin + n, [&](const auto* values, int64_t count, int64_t) {
    to = std::copy_n(values, count, to);
  });
}

int64_t TokenFiles::Largest() const {
  int64_t largest = 0;
  ForEachPart(0, size(), [&](const auto* values, int64_t count, int64_t) {
    largest = std::max<int64_t>(largest, *std::max_element(values, values + count));
  });
  return largest;
}

void TokenFiles::FindAfter(int64_t separator, std::vector<int64_t>& places) const {
  ForEachPart(0, size(), [&](const auto* values, int64_t count, int64_t place) {
    for (const auto* found = values;; ++found) {
      found = std::find(found, values + count, separator);
      if (found == values + count) return;
      places.push_back(place + (found - values) + 1);
    }
  });
}

void TokenFiles::AddTo(data::ContentsDigest& digest) const {
  const auto files = static_cast<int64_t>(files_.size());
  digest.Add(BytesOf(type_));
  digest.Add(files);
  for (int64_t i = 0; i < files; ++i) {
    digest.AddSamples(files_[i]->bytes(), data::ContentsDigest::PlacesOf(i, files));
  }
}

std::string TokenFiles::Describe(int64_t place) const {
  const auto file =
      std::upper_bound(starts_.begin(), starts_.end() - 1, place) - starts_.begin() - 1;
  return absl::StrCat(files_[file]->path(), ", token ", place - starts_[file]);
}

}  // namespace ddp::tools::datasets
