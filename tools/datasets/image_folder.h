// The images of a folder with a folder for each class, as torchvision's ImageFolder finds them.
//
//   DDP_ASSIGN_OR_RETURN(ImageFolder train, ImageFolder::Open("photos/train"));
//   train.files[17].path, train.classes[train.files[17].label]
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp::tools::datasets {

// A value.
struct ImageFolder {
  struct File {
    std::string path;
    int64_t label = 0;
  };

  // Files are sorted by class; in each by folder, then by name, at any depth.
  std::vector<File> files = {};
  // The names of the folders in `path`, sorted.
  std::vector<std::string> classes = {};

  // The files whose names end in .jpg, .jpeg or .png, in any case; other files are passed over, as
  // are names that begin with a dot. `classes`: those of the training images; empty: as they are
  // found. NotFound: no such folder, no class, or a class without images. InvalidArgument: a class
  // that is none of `classes`; a file of another format of images.
  static absl::StatusOr<ImageFolder> Open(const std::string& path,
                                          const std::vector<std::string>& classes = {});
};

}  // namespace ddp::tools::datasets
