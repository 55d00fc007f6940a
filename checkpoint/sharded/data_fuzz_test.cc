// Fuzz target of the data files: an input takes the place of one of them in a checkpoint whose
// manifest has their checksums. Another content is damage.
#include <stdlib.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/log_severity.h"
#include "absl/log/globals.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "base/file.h"
#include "base/fuzz_testing.h"
#include "base/runfiles.h"
#include "checkpoint/format.h"
#include "checkpoint/parts.h"

namespace ddp::checkpoint::sharded {
namespace {

// A copy of the golden checkpoint.
class Checkpoint {
 public:
  struct Data {
    std::string path;
    std::string bytes;
  };

  Checkpoint() {
    const std::string manifest =
        Runfile("libtorch_ddp/checkpoint/sharded/testdata/epoch_2.sharded/manifest.json").value();
    const char* scratch = std::getenv("TEST_TMPDIR");
    folder_ = (scratch != nullptr ? std::filesystem::path(scratch)
                                  : std::filesystem::temp_directory_path()) /
              "data_fuzz_test_XXXXXX";
    if (::mkdtemp(folder_.data()) == nullptr) std::abort();
    for (const auto& file :
         std::filesystem::directory_iterator(std::filesystem::path(manifest).parent_path())) {
      const std::string name = file.path().filename().string();
      const std::string bytes = ReadFile(file.path().string()).value();
      Put(PathOf(name), bytes);
      if (absl::StartsWith(name, "rank_")) data_.push_back({PathOf(name), bytes});
    }
  }
  ~Checkpoint() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

  const std::string& folder() const { return folder_; }

  // The data file of this size, else the first.
  const Data& FileOfSize(size_t size) const {
    const auto found = std::find_if(data_.begin(), data_.end(),
                                    [&](const Data& data) { return data.bytes.size() == size; });
    return found == data_.end() ? data_.front() : *found;
  }

  static void Put(const std::string& path, const std::string& bytes) {
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    if (!file.flush()) std::abort();
  }

 private:
  std::string PathOf(const std::string& name) const { return folder_ + "/" + name; }

  std::string folder_;
  std::vector<Data> data_;
};

// OK, or damage.
bool IsSound(const absl::Status& status) { return status.ok() || absl::IsDataLoss(status); }

void ReadWith(const Checkpoint& checkpoint, const std::string& input) {
  static const std::unique_ptr<Format> format = CreateFormat("sharded").value();
  const Checkpoint::Data& replaced = checkpoint.FileOfSize(input.size());
  Checkpoint::Put(replaced.path, input);
  const bool is_whole = input == replaced.bytes;
  const absl::Status all = format->Read(checkpoint.folder()).status();
  if (!IsSound(all) || all.ok() != is_whole) std::abort();
  const absl::Status complete = format->CheckComplete(checkpoint.folder());
  if (!IsSound(complete)) std::abort();
  if (input.size() != replaced.bytes.size() && complete.ok()) std::abort();
  if (is_whole && !complete.ok()) std::abort();
  const absl::Status part =
      format->Read(checkpoint.folder(), {.parts = {{"phase", FlatRange{0, 1}}}}).status();
  if (!IsSound(part) || (is_whole && !part.ok())) std::abort();
  Checkpoint::Put(replaced.path, replaced.bytes);
}

}  // namespace
}  // namespace ddp::checkpoint::sharded

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  absl::SetMinLogLevel(absl::LogSeverityAtLeast::kFatal);
  static const ddp::checkpoint::sharded::Checkpoint checkpoint;
  ddp::checkpoint::sharded::ReadWith(checkpoint,
                                     std::string(reinterpret_cast<const char*>(data), size));
  return 0;
}
