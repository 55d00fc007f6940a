// JPEG and PNG files as RGB bytes. Free of torch.
//
//   DDP_ASSIGN_OR_RETURN(Image image, DecodeImage("cat.jpg", bytes));
//   image.rgb[(y * image.width + x) * 3]  // red of a pixel
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ddp::tools::datasets {

struct Image {
  int64_t width = 0;
  int64_t height = 0;
  std::vector<uint8_t> rgb = {};  // [height, width, 3]
};

// The pixels as PIL's Image.open(path).convert("RGB") has them: what the file is decides and not
// its name; grey becomes three equal channels, a palette its colours, CMYK as Adobe's programs
// write it; alpha is left out; 16 bits become their upper 8, but of grey without alpha, where
// values above 255 become 255; an orientation in EXIF is not applied.
//
// InvalidArgument, with the path: the file is neither JPEG nor PNG, is damaged or incomplete, is a
// JPEG of 12 bits, or declares more than 2^27 pixels or more than its bytes can hold. The declared
// size is checked before memory is allocated. Thread-safe.
absl::StatusOr<Image> DecodeImage(const std::string& path, absl::string_view bytes);

}  // namespace ddp::tools::datasets
