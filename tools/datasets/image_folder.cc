#include "tools/datasets/image_folder.h"

#include <algorithm>
#include <filesystem>
#include <initializer_list>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/file.h"
#include "base/status.h"

namespace ddp::tools::datasets {
namespace {

namespace fs = std::filesystem;

bool EndsInAny(absl::string_view name, std::initializer_list<absl::string_view> ends) {
  return std::any_of(ends.begin(), ends.end(),
                     [&](absl::string_view end) { return absl::EndsWithIgnoreCase(name, end); });
}

// Adds (folder, name) of the images below `folder`.
absl::Status Find(const std::string& folder, int depth,
                  std::vector<std::pair<std::string, std::string>>& found) {
  constexpr int kMostDepth = 16;  // a link may lead upwards
  if (depth > kMostDepth) {
    return absl::InvalidArgumentError(absl::StrCat(folder, ": is too deep"));
  }
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(folder));
  for (const std::string& name : names) {
    if (absl::StartsWith(name, ".")) continue;
    const std::string path = absl::StrCat(folder, "/", name);
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    if (fs::is_directory(status)) {
      DDP_RETURN_IF_ERROR(Find(path, depth + 1, found));
    } else if (EndsInAny(name, {".jpg", ".jpeg", ".png"})) {
      // A link that leads nowhere is named as it is read.
      if (fs::exists(status) && !fs::is_regular_file(status)) {
        return absl::InvalidArgumentError(absl::StrCat(path, " is no regular file"));
      }
      found.emplace_back(folder, name);
    } else if (EndsInAny(name, {".avif", ".bmp", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jpe",
                                ".jxl", ".pgm", ".ppm", ".tif", ".tiff", ".webp"})) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": only .jpg, .jpeg and .png files are read; convert it"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ImageFolder> ImageFolder::Open(const std::string& path,
                                              const std::vector<std::string>& classes) {
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(path));
  ImageFolder folder;
  for (const std::string& name : names) {
    std::error_code error;
    if (absl::StartsWith(name, ".") || !fs::is_directory(absl::StrCat(path, "/", name), error)) {
      continue;
    }
    if (!classes.empty() && !std::binary_search(classes.begin(), classes.end(), name)) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, "/", name,
          ": is none of the classes of the training images: ", absl::StrJoin(classes, ", ")));
    }
    folder.classes.push_back(name);
  }
  if (folder.classes.empty()) {
    return absl::NotFoundError(
        absl::StrCat(path, ": has no folders; each class has one, with its images"));
  }
  if (!classes.empty()) folder.classes = classes;
  for (const std::string& name : names) {
    const auto label = std::lower_bound(folder.classes.begin(), folder.classes.end(), name);
    if (label == folder.classes.end() || *label != name) continue;
    std::vector<std::pair<std::string, std::string>> found;
    DDP_RETURN_IF_ERROR(Find(absl::StrCat(path, "/", name), 0, found));
    if (found.empty()) {
      return absl::NotFoundError(
          absl::StrCat(path, "/", name, ": has no file *.jpg, *.jpeg or *.png"));
    }
    std::sort(found.begin(), found.end());
    for (const auto& [of, file] : found) {
      folder.files.push_back({absl::StrCat(of, "/", file), label - folder.classes.begin()});
    }
  }
  return folder;
}

}  // namespace ddp::tools::datasets
