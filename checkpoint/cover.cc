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

std::string Encode(const std::map<std::string, TensorParts>& tensors) {
  Sender sender;
  for (const auto& [path, tensor] : tensors) {
    sender.Text(path);
    sender.Text(tensor.dtype);
    sender.Numbers(tensor.global_shape);
    sender.Numbers(tensor.memory_order);
    sender.Number(static_cast<int64_t>(tensor.parts.size()));
    for (const Part& part : tensor.parts) {
      sender.Number(static_cast<int64_t>(part.index()));
      if (const auto* box = std::get_if<Box>(&part)) {
        sender.Numbers(box->offset);
        sender.Numbers(box->sizes);
      } else if (const auto* range = std::get_if<FlatRange>(&part)) {
        sender.Number(range->begin);
        sender.Number(range->end);
      }
    }
  }
  return sender.Take();
}

Part ReceivePart(Receiver& receiver) {
  const size_t kind = static_cast<size_t>(receiver.Number());
  if (kind == Part(Box()).index()) {
    Box box;
    box.offset = receiver.Numbers();
    box.sizes = receiver.Numbers();
    return box;
  }
  if (kind != Part(FlatRange()).index()) return Whole{};
  FlatRange range;
  range.begin = receiver.Number();
  range.end = receiver.Number();
  return range;
}

// Adds what `rank` sent to the parts by path.
absl::Status Decode(int rank, absl::string_view bytes,
                    std::map<std::string, PartsOfRanks>& tensors) {
  for (Receiver receiver(bytes); !receiver.done();) {
    const std::string path = receiver.Text();
    const std::string dtype = receiver.Text();
    Shard shard;
    shard.global_shape = receiver.Numbers();
    shard.memory_order = receiver.Numbers();
    // A rank without any part says by an empty one what it takes the shape to be.
    std::vector<Part> parts;
    for (int64_t left = receiver.Number(); left > 0; --left) {
      parts.push_back(ReceivePart(receiver));
    }
    if (parts.empty()) parts.push_back(FlatRange{});
    PartsOfRanks& known = tensors.emplace(path, PartsOfRanks{dtype, {}}).first->second;
    if (dtype != known.dtype) {
      return absl::InvalidArgumentError(absl::StrCat("shards of '", path, "': ", known.dtype,
                                                     " on rank ", known.shards.front().rank,
                                                     " and ", dtype, " on rank ", rank));
    }
    for (Part& part : parts) {
      shard.part = std::move(part);
      known.shards.push_back({rank, shard});
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::map<std::string, PartsOfRanks>> GatherParts(
    const std::map<std::string, TensorParts>& mine, const Coordinator& ranks) {
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> from_ranks, ranks.AllGather(Encode(mine)));
  std::map<std::string, PartsOfRanks> tensors;
  const auto check = [&]() -> absl::Status {
    for (size_t rank = 0; rank < from_ranks.size(); ++rank) {
      DDP_RETURN_IF_ERROR(Decode(static_cast<int>(rank), from_ranks[rank], tensors));
    }
    if (ranks.rank() != 0) return absl::OkStatus();
    for (const auto& [path, tensor] : tensors) {
      DDP_RETURN_IF_ERROR(
          Annotate(CheckCover(tensor.shards), absl::StrCat("shards of '", path, "'")));
    }
    return absl::OkStatus();
  };
  DDP_RETURN_IF_ERROR(ranks.Agree(check()));
  return tensors;
}

absl::Status CheckCoverage(const std::map<std::string, TensorParts>& mine,
                           const Coordinator& ranks) {
  return GatherParts(mine, ranks).status();
}

}  // namespace ddp::checkpoint
