// Images of one size: the shorter side is scaled to it, and the middle of the longer one kept.
//
//   const Image thumbnail = ResizeAndCrop(image, 64);  // 64 x 64
#pragma once

#include <cstdint>

#include "tools/datasets/image_decode.h"

namespace ddp::tools::datasets {

// The bytes of torchvision's Resize(size) and CenterCrop(size) of a PIL image: bilinear, with
// antialiasing when it shrinks, in PIL's fixed-point arithmetic
// (https://github.com/python-pillow/Pillow, src/libImaging/Resample.c). `image` has at least one
// pixel; size >= 1. Thread-safe.
Image ResizeAndCrop(const Image& image, int64_t size);

}  // namespace ddp::tools::datasets
