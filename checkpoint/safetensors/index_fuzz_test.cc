// Fuzz target: the index of a folder of two files, as other programs write it. Whatever it says, no
// file beside that folder is read.
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue_inl.h>
#include <stdlib.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <system_error>

#include "absl/base/log_severity.h"
#include "absl/log/globals.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/fuzz_testing.h"
#include "checkpoint/format.h"

namespace ddp::checkpoint::safetensors {
namespace {

void Put(const std::string& path, absl::string_view bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file.flush()) std::abort();
}

// A file with one tensor, of three bytes `value`.
std::string FileWith(const std::string& tensor, char value) {
  const std::string header =
      R"({")" + tensor + R"(":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})";
  return std::string(1, static_cast<char>(header.size())) + std::string(7, '\0') + header +
         std::string(3, value);
}

class Folder {
 public:
  Folder() {
    const char* scratch = std::getenv("TEST_TMPDIR");
    parent_ = (scratch != nullptr ? std::filesystem::path(scratch)
                                  : std::filesystem::temp_directory_path()) /
              "index_fuzz_test_XXXXXX";
    if (::mkdtemp(parent_.data()) == nullptr) std::abort();
    std::filesystem::create_directory(path());
    Put(parent_ + "/outside.safetensors", FileWith("a", 3));
    Put(path() + "/model-00001-of-00002.safetensors", FileWith("a", 1));
    Put(path() + "/model-00002-of-00002.safetensors", FileWith("b", 2));
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(parent_, ignored);
  }

  std::string path() const { return parent_ + "/model"; }

 private:
  std::string parent_;
};

// OK, or damage.
bool IsSound(const absl::Status& status) { return status.ok() || absl::IsDataLoss(status); }

void ReadWith(const Folder& folder, absl::string_view index) {
  static const std::unique_ptr<Format> format = CreateFormat("safetensors").value();
  Put(folder.path() + "/model.safetensors.index.json", index);
  const absl::Status complete = format->CheckComplete(folder.path());
  const absl::StatusOr<State> read = format->Read(folder.path());
  if (!IsSound(read.status()) || complete.ok() != read.ok()) std::abort();
  if (!read.ok()) return;
  const c10::impl::GenericDict model = read->root.at("model").toGenericDict();
  for (const auto& entry : model) {
    const int value = entry.key().toStringRef() == "a" ? 1 : 2;
    if (!at::equal(entry.value().toTensor(), at::full({3}, value, at::kByte))) std::abort();
  }
}

}  // namespace
}  // namespace ddp::checkpoint::safetensors

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  absl::SetMinLogLevel(absl::LogSeverityAtLeast::kFatal);
  static const ddp::checkpoint::safetensors::Folder folder;
  ddp::checkpoint::safetensors::ReadWith(folder, {reinterpret_cast<const char*>(data), size});
  return 0;
}
