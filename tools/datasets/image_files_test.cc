// image_decode, image_resize, image_folder and images, on files that PIL wrote:
// testdata/make_images.py.
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/file.h"
#include "gtest/gtest.h"
#include "tools/datasets/image_decode.h"
#include "tools/datasets/image_folder.h"
#include "tools/datasets/image_resize.h"
#include "tools/datasets/images.h"
#include "zlib.h"

namespace ddp::tools::datasets {
namespace {

constexpr char kImages[] = "tools/datasets/testdata/images/";

std::string FileOf(const std::string& name) { return ReadFile(kImages + name).value(); }

std::string Crc(absl::string_view bytes) {
  return absl::StrFormat("%08x", crc32(0, reinterpret_cast<const Bytef*>(bytes.data()),
                                       static_cast<uInt>(bytes.size())));
}
std::string Crc(const Image& image) {
  return Crc(absl::string_view(reinterpret_cast<const char*>(image.rgb.data()), image.rgb.size()));
}

std::vector<std::string> Names() {
  std::vector<std::string> names = ListDirectory(kImages).value();
  names.erase(std::find(names.begin(), names.end(), "expected.txt"));
  return names;
}

// A chunk of a PNG file.
std::string Chunk(const std::string& kind_and_data) {
  const auto big_endian = [](uint32_t value) {
    std::string bytes;
    for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(value >> shift);
    return bytes;
  };
  const auto size = static_cast<uint32_t>(kind_and_data.size());
  const auto sum = crc32(0, reinterpret_cast<const Bytef*>(kind_and_data.data()), size);
  return big_endian(size - 4) + kind_and_data + big_endian(static_cast<uint32_t>(sum));
}

std::string ErrorOf(absl::string_view bytes) {
  const absl::StatusOr<Image> image = DecodeImage("a.jpg", bytes);
  return std::string(image.status().message());
}

TEST(ImageFilesTest, PixelsAreThoseOfPil) {
  std::ifstream expected(absl::StrCat(kImages, "expected.txt"));
  std::string line;
  size_t count = 0;
  for (; std::getline(expected, line); ++count) {
    const std::string name = line.substr(0, line.find(' '));
    const auto image = DecodeImage(name, FileOf(name));
    ASSERT_TRUE(image.ok()) << image.status();
    std::string found = absl::StrCat(name, " ", image->width, " ", image->height, " ", Crc(*image));
    for (const int64_t size : {5, 16, 40}) {
      absl::StrAppend(&found, " ", Crc(ResizeAndCrop(*image, size)));
    }
    EXPECT_EQ(found, line);
  }
  EXPECT_EQ(count, Names().size());
  EXPECT_GT(count, 10u);
}

// Or their pixels are right: of PNG the last checksum, of nothing, may be missing.
TEST(ImageFilesTest, IncompleteFilesAreRefused) {
  for (const std::string& name : Names()) {
    const std::string whole = FileOf(name);
    for (size_t size = 0; size < whole.size(); ++size) {
      const auto image = DecodeImage(name, absl::string_view(whole).substr(0, size));
      if (image.ok() && size + 4 >= whole.size()) {
        ASSERT_EQ(Crc(*image), Crc(DecodeImage(name, whole).value())) << name;
        continue;
      }
      ASSERT_FALSE(image.ok()) << name << " of " << size << " bytes";
      ASSERT_TRUE(absl::StartsWith(image.status().message(), absl::StrCat(name, ": is ")))
          << image.status();
    }
  }
}

// A PNG file has checksums: it is refused, or its pixels are right. One of JPEG has none.
TEST(ImageFilesTest, DamagedFilesAreRefusedOrHarmless) {
  for (const std::string& name : Names()) {
    const std::string whole = FileOf(name);
    const std::string pixels = Crc(DecodeImage(name, whole).value());
    const bool is_png = absl::StrContains(name, "png") || absl::StrContains(name, "interlaced");
    std::map<bool, int> refused;
    for (size_t at = 0; at < whole.size(); ++at) {
      for (const char flipped : {'\x01', '\x80', '\xff'}) {
        std::string damaged = whole;
        damaged[at] = static_cast<char>(damaged[at] ^ flipped);
        const auto image = DecodeImage(name, damaged);
        ++refused[!image.ok()];
        if (!image.ok()) {
          ASSERT_TRUE(absl::StartsWith(image.status().message(), name)) << image.status();
          continue;
        }
        ASSERT_EQ(static_cast<int64_t>(image->rgb.size()), image->width * image->height * 3);
        if (is_png) {
          ASSERT_EQ(Crc(*image), pixels) << name << ", byte " << at;
        }
      }
    }
    EXPECT_GT(refused[true], 0) << name;
  }
}

TEST(ImageFilesTest, SizesAreCheckedBeforeThereIsMemoryForThem) {
  // 30,000 x 30,000 pixels would be 2.7 GB.
  std::string header("IHDR\0\0\x75\x30\0\0\x75\x30\x08\x02\0\0\0", 17);
  EXPECT_EQ(ErrorOf("\x89PNG\r\n\x1a\n" + Chunk(header)),
            "a.jpg: is an image of 30000 x 30000 pixels; at most 134217728 are read");
  header = std::string("IHDR\0\0\x2a\xf8\0\0\x2a\xf8\x01\0\0\0\0", 17);
  EXPECT_TRUE(absl::StartsWith(ErrorOf("\x89PNG\r\n\x1a\n" + Chunk(header) + Chunk("IDATabc")),
                               "a.jpg: says that it has 11000 x 11000 pixels, more than its "));
  std::string jpeg = FileOf("rgb_420.jpg");
  const size_t frame = jpeg.find("\xff\xc0");
  ASSERT_NE(frame, std::string::npos);
  jpeg.replace(frame + 5, 4, "\x2a\xf8\x2a\xf8");  // height, width
  EXPECT_TRUE(absl::StartsWith(ErrorOf(jpeg), "a.jpg: says that it has 11000 x 11000 pixels"));
  jpeg.replace(frame + 5, 4, std::string("\0\x11\0\0", 4));
  EXPECT_TRUE(absl::StartsWith(ErrorOf(jpeg), "a.jpg: is a damaged JPEG file: Empty JPEG image"));
}

TEST(ImageFilesTest, OtherFilesAreRefused) {
  EXPECT_EQ(ErrorOf(""), "a.jpg: is empty");
  EXPECT_EQ(ErrorOf("GIF89a"), "a.jpg: is neither a JPEG nor a PNG file");
  std::string twelve_bits = FileOf("rgb_420.jpg");
  twelve_bits[twelve_bits.find("\xff\xc0") + 4] = 12;
  EXPECT_EQ(ErrorOf(twelve_bits),
            "a.jpg: is a damaged JPEG file: Unsupported JPEG data precision 12");
}

TEST(ImageFilesTest, OneSizeForAllImages) {
  // Without change, and of one pixel.
  const Image image = DecodeImage("rgb.png", FileOf("rgb.png")).value();
  const Image middle = ResizeAndCrop(image, 17);
  for (int64_t y = 0; y < 17; ++y) {
    for (int64_t i = 0; i < 17 * 3; ++i) {
      ASSERT_EQ(middle.rgb[y * 17 * 3 + i], image.rgb[(y * 23 + 3) * 3 + i]);
    }
  }
  const Image grown = ResizeAndCrop({.width = 1, .height = 1, .rgb = {1, 2, 255}}, 3);
  for (size_t i = 0; i < 27; i += 3) {
    EXPECT_EQ(std::vector<uint8_t>(grown.rgb.begin() + i, grown.rgb.begin() + i + 3),
              (std::vector<uint8_t>{1, 2, 255}));
  }
  Image thin = {.width = 65'500, .height = 1};
  thin.rgb.assign(65'500 * 3, 9);
  EXPECT_EQ(ResizeAndCrop(thin, 2).rgb, std::vector<uint8_t>(12, 9));
}

class ImageFolderTest : public testing::Test {
 protected:
  ImageFolderTest()
      : folder_(absl::StrCat(testing::TempDir(), "/",
                             testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  void Touch(const std::string& name) {
    const std::filesystem::path path = folder_ + "/" + name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream file(path);
  }
  std::string ErrorOf(const std::vector<std::string>& classes = {}) {
    return std::string(ImageFolder::Open(folder_, classes).status().message());
  }

  const std::string folder_;
};

TEST_F(ImageFolderTest, FilesAreThoseOfTorchvision) {
  for (const char* const name : {"dog/b.png", "dog/a/z.jpg", "dog/A.JPEG", "cat/1.jpg", "cat/2.txt",
                                 "cat/.hidden.jpg", ".git/x.jpg", "README.md"}) {
    Touch(name);
  }
  const auto folder = ImageFolder::Open(folder_);
  ASSERT_TRUE(folder.ok()) << folder.status();
  EXPECT_EQ(folder->classes, (std::vector<std::string>{"cat", "dog"}));
  std::vector<std::string> files;
  for (const ImageFolder::File& file : folder->files) {
    files.push_back(absl::StrCat(file.path.substr(folder_.size() + 1), " ", file.label));
  }
  EXPECT_EQ(files, (std::vector<std::string>{"cat/1.jpg 0", "dog/A.JPEG 1", "dog/b.png 1",
                                             "dog/a/z.jpg 1"}));
  // Labels are those of the training images.
  EXPECT_EQ(ImageFolder::Open(folder_, {"ape", "cat", "dog"})->files.back().label, 2);
  EXPECT_TRUE(absl::StrContains(ErrorOf({"cat"}), "/dog: is none of the classes of the training"));
}

TEST_F(ImageFolderTest, ErrorsNameTheFolder) {
  EXPECT_TRUE(absl::StrContains(ErrorOf(), "ErrorsNameTheFolder: has no folders"));
  std::filesystem::create_directories(folder_ + "/cat");
  EXPECT_TRUE(absl::StrContains(ErrorOf(), "/cat: has no file *.jpg"));
  Touch("cat/a.webp");
  EXPECT_TRUE(absl::StrContains(ErrorOf(), "/cat/a.webp: only .jpg, .jpeg and .png"));
  std::filesystem::remove(folder_ + "/cat/a.webp");
  // Of a telephone's pictures some would be left out without a word.
  Touch("cat/b.jpg");
  for (const std::string name : {"cat/a.HEIC", "cat/a.jfif"}) {
    Touch(name);
    EXPECT_TRUE(absl::StrContains(ErrorOf(), absl::StrCat(name, ": only .jpg, .jpeg and .png")));
    std::filesystem::remove(folder_ + "/" + name);
  }
  // Opening it would wait for a writer.
  ASSERT_EQ(mkfifo((folder_ + "/cat/pipe.png").c_str(), 0600), 0);
  EXPECT_TRUE(absl::StrContains(ErrorOf(), "/cat/pipe.png is no regular file"));
  std::filesystem::remove(folder_ + "/cat/pipe.png");
  std::filesystem::create_directory_symlink(".", folder_ + "/cat/again");
  EXPECT_TRUE(absl::StrContains(ErrorOf(), "is too deep"));
  EXPECT_FALSE(ImageFolder::Open(folder_ + "/nowhere").ok());
}

class ImagesTest : public testing::Test {
 protected:
  ImagesTest()
      : folder_(absl::StrCat(testing::TempDir(), "/images_",
                             testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::remove_all(folder_);
  }
  void Copy(const std::string& from, const std::string& to) {
    const std::filesystem::path path = folder_ + "/" + to;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << FileOf(from);
  }
  absl::StatusOr<Splits> Load(const ImagesOptions& own, int64_t train_size = 0) {
    DatasetOptions options = {.data_dir = folder_, .train_size = train_size};
    options.implementations.Mutable<ImagesOptions>("images") = own;
    return LoadImages(options);
  }

  const std::string folder_;
};

TEST_F(ImagesTest, BatchesAreNormalisedByChannelAndLabelsAreThoseOfTraining) {
  Copy("tall.jpg", "train/cat/1.jpg");
  Copy("rgb.png", "train/dog/1.png");
  Copy("rgb.png", "test/dog/1.png");
  const ImagesOptions own = {.size = 5, .mean = {0.1, 0.2, 0.3}, .std = {0.5, 1, 2}};
  const auto splits = Load(own);
  ASSERT_TRUE(splits.ok()) << splits.status();
  EXPECT_EQ(splits->num_classes, 2);
  EXPECT_EQ(splits->input_shape, (std::vector<int64_t>{3, 5, 5}));
  EXPECT_EQ(splits->train->size(), 2);
  const data::Batch batch = splits->train->Get({1, 0});
  EXPECT_EQ(batch.input.numel(), 2 * 3 * 5 * 5);
  EXPECT_EQ(batch.target.const_data_ptr<int64_t>()[0], 1);
  EXPECT_EQ(batch.target.const_data_ptr<int64_t>()[1], 0);
  const Image image = ResizeAndCrop(DecodeImage("rgb.png", FileOf("rgb.png")).value(), 5);
  const float* input = batch.input.const_data_ptr<float>();
  for (size_t channel = 0; channel < 3; ++channel) {
    for (size_t i = 0; i < 25; ++i) {
      const double expected =
          (image.rgb[i * 3 + channel] / 255.0 - own.mean[channel]) / own.std[channel];
      EXPECT_FLOAT_EQ(*input++, static_cast<float>(expected)) << channel << " " << i;
    }
  }
  // Of the test images there are no cats.
  EXPECT_EQ(splits->test->Get({0}).target.const_data_ptr<int64_t>()[0], 1);
  EXPECT_EQ(Load(own, 1)->train->size(), 1);
  EXPECT_TRUE(absl::StrContains(Load(own, 3).status().message(), "train_size=3"));
  EXPECT_TRUE(absl::StrContains(Load({.mean = {0.5}}).status().message(), "dataset.images.mean"));
}

// The first ones would be all of one class.
TEST_F(ImagesTest, APartHasAllClasses) {
  for (const char* const name : {"cat", "dog", "owl"}) {
    for (int i = 0; i < 4; ++i) Copy("rgb.png", absl::StrCat("train/", name, "/", i, ".png"));
    Copy("rgb.png", absl::StrCat("test/", name, "/1.png"));
  }
  const auto some = Load({.size = 2}, 6);
  ASSERT_TRUE(some.ok()) << some.status();
  ASSERT_EQ(some->train->size(), 6);
  const at::Tensor labels = some->train->Get({0, 1, 2, 3, 4, 5}).target;
  for (int64_t i = 0; i < 6; ++i) {
    EXPECT_EQ(labels.const_data_ptr<int64_t>()[i], i / 2) << i;
  }
  EXPECT_NE(some->train->Fingerprint(), Load({.size = 2})->train->Fingerprint());
}

TEST_F(ImagesTest, AFolderThatIsMissingIsAnErrorOfTheOption) {
  const auto expect = [&](const std::string& missing) {
    const absl::Status error = Load({}).status();
    EXPECT_TRUE(absl::StartsWith(
        error.message(), absl::StrCat("dataset.data_dir=", folder_, " has no folder ", missing)))
        << error;
  };
  expect("train");
  Copy("rgb.png", "train/cat/1.png");
  expect("test");
}

TEST_F(ImagesTest, ValIsReadWhereThereIsNoTest) {
  Copy("rgb.png", "train/cat/1.png");
  Copy("rgb.png", "val/cat/1.png");
  Copy("rgb.png", "val/cat/2.png");
  const auto val = Load({.size = 2});
  ASSERT_TRUE(val.ok()) << val.status();
  EXPECT_EQ(val->test->size(), 2);
  Copy("rgb.png", "test/cat/1.png");
  const auto test = Load({.size = 2});
  ASSERT_TRUE(test.ok()) << test.status();
  EXPECT_EQ(test->test->size(), 1);
}

}  // namespace
}  // namespace ddp::tools::datasets
