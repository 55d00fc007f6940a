#include "checkpoint/cover.h"

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status.h"

namespace ddp::checkpoint {
namespace {

// Serialisation between ranks of the same program: numbers in native byte order.
class Sender {
 public:
  void Number(int64_t value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void Numbers(const std::vector<int64_t>& values) {
    Number(static_cast<int64_t>(values.size()));
    for (int64_t value : values) Number(value);
  }
  void Text(absl::string_view text) {
    Number(static_cast<int64_t>(text.size()));
    bytes_.append(text);
  }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class Receiver {
 public:
  explicit Receiver(absl::string_view bytes) : bytes_(bytes) {}

  bool done() const { return bytes_.empty(); }
  int64_t Number() {
    int64_t value = 0;
    std::memcpy(&value, bytes_.data(), sizeof(value));
    bytes_.remove_prefix(sizeof(value));
    return value;
  }
  std::vector<int64_t> Numbers() {
    std::vector<int64_t> values(static_cast<size_t>(Number()));
    for (int64_t& value : values) value = Number();
    return values;
  }
  std::string Text() {
    const size_t size = static_cast<size_t>(Number());
    const std::string text(bytes_.substr(0, size));
    bytes_.remove_prefix(size);
    return text;
  }

 private:
  absl::string_view bytes_;
};

std::string Encode(const std::map<std::string, Shard>& shards) {
  Sender sender;
  for (const auto& [path, shard] : shards) {
    sender.Text(path);
    sender.Numbers(shard.global_shape);
    sender.Number(static_cast<int64_t>(shard.part.index()));
    if (const auto* box = std::get_if<Box>(&shard.part)) {
      sender.Numbers(box->offset);
      sender.Numbers(box->sizes);
    } else if (const auto* range = std::get_if<FlatRange>(&shard.part)) {
      sender.Number(range->begin);
      sender.Number(range->end);
    }
  }
  return sender.Take();
}

// Adds what `rank` sent to the parts by path.
void Decode(int rank, absl::string_view bytes,
            std::map<std::string, std::vector<RankShard>>& parts) {
  for (Receiver receiver(bytes); !receiver.done();) {
    const std::string path = receiver.Text();
    Shard shard;
    shard.global_shape = receiver.Numbers();
    const size_t kind = static_cast<size_t>(receiver.Number());
    if (kind == Part(Box()).index()) {
      Box box;
      box.offset = receiver.Numbers();
      box.sizes = receiver.Numbers();
      shard.part = std::move(box);
    } else if (kind == Part(FlatRange()).index()) {
      FlatRange range;
      range.begin = receiver.Number();
      range.end = receiver.Number();
      shard.part = range;
    }
    parts[path].push_back({rank, std::move(shard)});
  }
}

absl::Status CheckAll(const std::vector<std::string>& from_ranks) {
  std::map<std::string, std::vector<RankShard>> parts;
  for (size_t rank = 0; rank < from_ranks.size(); ++rank) {
    Decode(static_cast<int>(rank), from_ranks[rank], parts);
  }
  for (const auto& [path, shards] : parts) {
    DDP_RETURN_IF_ERROR(Annotate(CheckCover(shards), absl::StrCat("shards of '", path, "'")));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckCoverage(const std::map<std::string, Shard>& mine, const Coordinator& ranks) {
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> all, ranks.AllGather(Encode(mine)));
  return ranks.Agree(ranks.rank() == 0 ? CheckAll(all) : absl::OkStatus());
}

}  // namespace ddp::checkpoint
