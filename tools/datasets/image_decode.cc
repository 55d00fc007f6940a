#include "tools/datasets/image_decode.h"

#include <algorithm>
#include <array>
#include <csetjmp>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "jerror.h"
#include "jpeglib.h"
#include "spng.h"

namespace ddp::tools::datasets {
namespace {

constexpr int64_t kMostPixels = int64_t{1} << 27;
constexpr int64_t kMostSide = 65'500;  // libjpeg's
// Besides the pixels: texts, colour profiles.
constexpr size_t kMostChunk = size_t{16} << 20;

absl::Status Refuse(const std::string& path, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", why));
}

// `bits`: of a pixel before compression, which makes a byte of at most `ratio` bytes.
absl::Status CheckSize(const std::string& path, int64_t width, int64_t height, int64_t bits,
                       int64_t ratio, size_t bytes) {
  if (width < 1 || height < 1 || width > kMostSide || height > kMostSide ||
      width * height > kMostPixels) {
    return Refuse(path, absl::StrCat("is an image of ", width, " x ", height, " pixels; at most ",
                                     kMostPixels, " are read"));
  }
  if (width * height * bits > 8 * ratio * static_cast<int64_t>(bytes)) {
    return Refuse(path, absl::StrCat("says that it has ", width, " x ", height,
                                     " pixels, more than its ", bytes, " bytes can hold"));
  }
  return absl::OkStatus();
}

// libjpeg's errors; it leaves by longjmp, over frames of C alone.
struct JpegErrors {
  jpeg_error_mgr base;  // first: libjpeg knows this part only
  std::jmp_buf leave;
  char message[JMSG_LENGTH_MAX];
};

[[noreturn]] void LeaveJpeg(j_common_ptr info) {
  auto* errors = reinterpret_cast<JpegErrors*>(info->err);
  info->err->format_message(info, errors->message);
  std::longjmp(errors->leave, 1);
}

// libjpeg goes on after damage and fills the rest with grey: here that is an error. What the pixels
// do not depend on is none.
void WarnOfJpeg(j_common_ptr info, int level) {
  if (level >= 0) return;
  switch (info->err->msg_code) {
    case JWRN_ADOBE_XFORM:
    case JWRN_EXTRANEOUS_DATA:
    case JWRN_JFIF_MAJOR:
    case JWRN_TOO_MUCH_DATA:
      return;
    default:
      LeaveJpeg(info);
  }
}

// As PIL: Adobe's programs write the inverse of each ink.
void CmykToRgb(const uint8_t* cmyk, int64_t pixels, uint8_t* rgb) {
  for (; pixels > 0; --pixels, cmyk += 4, rgb += 3) {
    const int white = cmyk[3];
    for (int i = 0; i < 3; ++i) {
      const int product = (255 - cmyk[i]) * white + 128;
      const int ink = ((product >> 8) + product) >> 8;
      rgb[i] = static_cast<uint8_t>(white > ink ? white - ink : 0);
    }
  }
}

// The part that libjpeg may leave: no object with a destructor lives in it. `row` has four bytes
// per pixel. `step` is 0 up to the header, 1 for the pixels. False: errors.message says why.
bool DecodeJpegStep(jpeg_decompress_struct& info, JpegErrors& errors, int step,
                    absl::string_view bytes, uint8_t* row, uint8_t* to) {
  if (setjmp(errors.leave) != 0) return false;
  if (step == 0) {
    jpeg_create_decompress(&info);
    jpeg_mem_src(&info, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
    jpeg_read_header(&info, TRUE);
    return true;
  }
  const bool is_cmyk = info.num_components == 4;
  info.out_color_space = is_cmyk ? JCS_CMYK : JCS_RGB;
  jpeg_start_decompress(&info);
  while (info.output_scanline < info.output_height) {
    uint8_t* line = to + size_t{info.output_scanline} * info.output_width * 3;
    JSAMPROW rows[1] = {is_cmyk ? row : line};
    jpeg_read_scanlines(&info, rows, 1);
    if (is_cmyk) CmykToRgb(row, info.output_width, line);
  }
  jpeg_finish_decompress(&info);
  return true;
}

absl::StatusOr<Image> DecodeJpeg(const std::string& path, absl::string_view bytes) {
  JpegErrors errors = {};
  jpeg_decompress_struct info = {};
  info.err = jpeg_std_error(&errors.base);
  errors.base.error_exit = LeaveJpeg;
  errors.base.emit_message = WarnOfJpeg;
  // Also of one that was never created: then it does nothing.
  const std::unique_ptr<jpeg_decompress_struct, void (*)(jpeg_decompress_struct*)> destroyed(
      &info, [](jpeg_decompress_struct* each) { jpeg_destroy_decompress(each); });
  const auto damaged = [&] {
    return Refuse(path, absl::StrCat("is a damaged JPEG file: ", errors.message));
  };
  if (!DecodeJpegStep(info, errors, 0, bytes, nullptr, nullptr)) return damaged();
  Image image = {.width = info.image_width, .height = info.image_height};
  // A block of 64 pixels takes a bit at least.
  DDP_RETURN_IF_ERROR(CheckSize(path, image.width, image.height, 1, 64, bytes.size()));
  image.rgb.resize(image.width * image.height * 3);
  std::vector<uint8_t> row(info.num_components == 4 ? image.width * 4 : 0);
  if (!DecodeJpegStep(info, errors, 1, bytes, row.data(), image.rgb.data())) return damaged();
  return image;
}

absl::StatusOr<Image> DecodePng(const std::string& path, absl::string_view bytes) {
  const std::unique_ptr<spng_ctx, void (*)(spng_ctx*)> context(spng_ctx_new(0), spng_ctx_free);
  if (context == nullptr) return absl::ResourceExhaustedError(absl::StrCat(path, ": no memory"));
  const auto damaged = [&](int error) {
    return Refuse(path, absl::StrCat("is a damaged PNG file: ", spng_strerror(error)));
  };
  spng_set_chunk_limits(context.get(), kMostChunk, kMostChunk);
  spng_set_png_buffer(context.get(), bytes.data(), bytes.size());
  spng_ihdr header = {};
  if (const int error = spng_get_ihdr(context.get(), &header); error != 0) return damaged(error);
  Image image = {.width = header.width, .height = header.height};
  constexpr std::array<int64_t, 7> kChannels = {1, 0, 3, 1, 2, 0, 4};  // by type of colour
  constexpr int64_t kDeflate = 1032;                                   // its highest ratio
  DDP_RETURN_IF_ERROR(CheckSize(path, image.width, image.height,
                                header.bit_depth * kChannels[header.color_type], kDeflate,
                                bytes.size()));
  const int64_t pixels = image.width * image.height;
  image.rgb.resize(pixels * 3);
  // PIL clips grey of 16 bits, and takes the upper bytes of other colours. The values are decoded
  // into the end of the result: none is overwritten before it is read.
  const bool is_grey_16 = header.color_type == SPNG_COLOR_TYPE_GRAYSCALE && header.bit_depth == 16;
  uint8_t* const decoded = image.rgb.data() + (is_grey_16 ? pixels : 0);
  if (const int error = spng_decode_image(context.get(), decoded, pixels * (is_grey_16 ? 2 : 3),
                                          is_grey_16 ? SPNG_FMT_RAW : SPNG_FMT_RGB8, 0);
      error != 0) {
    return damaged(error);
  }
  for (int64_t i = 0; is_grey_16 && i < pixels; ++i) {
    const uint8_t grey = decoded[2 * i] > 0 ? 255 : decoded[2 * i + 1];  // big-endian
    std::fill_n(&image.rgb[3 * i], 3, grey);
  }
  // The checksum of the last pixels is behind them.
  if (const int error = spng_decode_chunks(context.get()); error != 0) return damaged(error);
  return image;
}

}  // namespace

absl::StatusOr<Image> DecodeImage(const std::string& path, absl::string_view bytes) {
  if (absl::StartsWith(bytes, "\xff\xd8\xff")) return DecodeJpeg(path, bytes);
  if (absl::StartsWith(bytes, "\x89PNG\r\n\x1a\n")) return DecodePng(path, bytes);
  return Refuse(path, bytes.empty() ? "is empty" : "is neither a JPEG nor a PNG file");
}

}  // namespace ddp::tools::datasets
