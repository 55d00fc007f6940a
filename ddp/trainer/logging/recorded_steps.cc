#include "ddp/trainer/logging/recorded_steps.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/option_error.h"
#include "ddp/trainer/logging/event.pb.h"

namespace ddp::trainer::logging {
namespace {

// A record of metrics is far smaller; more means that the file is none of ours.
constexpr uint64_t kLongestRecord = 64 << 20;

// JsonlWriter's lines begin with their step.
bool JsonlHasSteps(std::ifstream& file) {
  for (std::string line; std::getline(file, line);) {
    absl::string_view rest = line;
    int64_t step = 0;
    if (absl::ConsumePrefix(&rest, "{\"step\":") &&
        absl::SimpleAtoi(rest.substr(0, rest.find_first_of(",}")), &step) && step > 0) {
      return true;
    }
  }
  return false;
}

// TFRecords (tensorboard_writer.h), whose checksums do not matter here.
bool EventsHaveSteps(std::ifstream& file) {
  constexpr int64_t kChecksum = 4;
  std::array<unsigned char, 8> header;
  while (file.read(reinterpret_cast<char*>(header.data()), header.size())) {
    uint64_t length = 0;
    for (size_t i = 0; i < header.size(); ++i) length |= uint64_t{header[i]} << 8 * i;
    if (length > kLongestRecord) return false;
    std::string record(length, '\0');
    file.ignore(kChecksum);
    if (!file.read(record.data(), static_cast<int64_t>(length))) return false;
    file.ignore(kChecksum);
    tensorboard::Event event;
    if (event.ParseFromString(record) && event.has_summary() && event.step() > 0) return true;
  }
  return false;
}

}  // namespace

absl::StatusOr<std::optional<std::string>> FindRecordedSteps(const std::string& log_dir) {
  std::error_code error;
  std::vector<std::string> names;
  for (std::filesystem::directory_iterator entries(log_dir, error), end; !error && entries != end;
       entries.increment(error)) {
    std::error_code ignored;  // a device would never end
    if (!entries->is_regular_file(ignored)) continue;
    names.push_back(entries->path().filename().string());
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    return FileError(error.value(), "reading", log_dir);
  }
  std::sort(names.rbegin(), names.rend());  // metrics.jsonl first
  for (const std::string& name : names) {
    const bool is_jsonl = name == "metrics.jsonl";
    if (!is_jsonl && !absl::StartsWith(name, "events.out.tfevents.")) continue;
    const std::string path = absl::StrCat(log_dir, "/", name);
    std::ifstream file(path, std::ios::binary);
    if (is_jsonl ? JsonlHasSteps(file) : EventsHaveSteps(file)) return path;
  }
  return std::nullopt;
}

absl::Status HoldsAnotherLog(const std::string& log_dir, absl::string_view file,
                             absl::string_view to_go_on) {
  return OptionError("log.dir", log_dir,
                     absl::StrCat("holds the log of a run (", file, "); ", to_go_on,
                                  to_go_on.empty() ? "" : ", or ", "choose another folder"),
                     absl::StatusCode::kAlreadyExists);
}

}  // namespace ddp::trainer::logging
