#include "ddp/gather/all_agree.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/equal.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "ddp/gather/gather.h"
#include "ddp/tree/format.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace ddp {
namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int64_t kChunk = 16 << 20;  // bytes
constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

struct Described {
  std::string name;
  std::string what;  // dtype, shape, …

  bool operator==(const Described& other) const = default;
};
constexpr auto FieldsOf(const Described&) {
  return Fields(Field("name", &Described::name), Field("what", &Described::what));
}

std::string Shape(const at::Tensor& tensor) {
  return absl::StrCat("[", absl::StrJoin(tensor.sizes(), ", "), "]");
}

std::string Describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  std::string text = absl::StrCat(c10::toString(tensor.scalar_type()), " ", Shape(tensor));
  if (!tensor.is_cpu())
    absl::StrAppend(&text, " on ", c10::DeviceTypeName(tensor.device().type(), true));
  if (tensor.layout() != c10::kStrided) {
    absl::StrAppend(&text, ", ", c10::str(tensor.layout()));
  }
  if (tensor.is_sparse()) {
    absl::StrAppend(&text, " with values ", Shape(tensor._values()),
                    tensor.is_coalesced() ? "" : ", not coalesced");
  }
  return text;
}

// The dense tensors that a tensor is made of.
std::vector<at::Tensor> Parts(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  if (tensor.is_sparse()) return {tensor._indices(), tensor._values()};
  return {tensor};
}

constexpr char kNotComparable[] = ", which cannot be compared";

bool IsComparable(const at::Tensor& tensor) {
  const std::vector<at::Tensor> parts = Parts(tensor);
  return std::all_of(parts.begin(), parts.end(), [](const at::Tensor& part) {
    return part.layout() == c10::kStrided && tree_internal::IsPlain(part.scalar_type()) &&
           tree_internal::HasMemory(part.device().type()) && part.has_storage() &&
           !part._is_zerotensor();
  });
}

// What has to be the same bits, and the position of its tensor in the list.
struct Piece {
  size_t tensor;
  at::Tensor bytes;
};

std::vector<Piece> Pieces(const NamedTensors& tensors, size_t count) {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < count; ++i) {
    for (const at::Tensor& part : Parts(tensors[i].second)) {
      if (part.numel() == 0) continue;
      const at::Tensor plain = part.detach().resolve_conj().resolve_neg().contiguous();
      pieces.push_back({i, tree_internal::AsBytes(plain)});
    }
  }
  return pieces;
}

// Compares with rank 0's, which it broadcasts. Returns the first tensor that differs, or kNone.
int64_t FirstDifferentBits(c10d::ProcessGroup& group, const std::vector<Piece>& pieces) {
  const std::vector<c10::Device> devices = group.getDeviceTypes();
  const auto serves = [&](c10::Device device) {
    return devices.empty() || std::any_of(devices.begin(), devices.end(),
                                          [&](c10::Device d) { return d.type() == device.type(); });
  };
  int64_t first = kNone;
  // Small tensors share a message.
  std::vector<Piece> batch;
  int64_t size = 0;
  const auto compare = [&] {
    if (batch.empty()) return;
    std::vector<at::Tensor> parts;
    for (const Piece& piece : batch) parts.push_back(piece.bytes);
    const at::Tensor mine = at::cat(parts);
    const c10::Device via = serves(mine.device()) ? mine.device() : c10::Device(devices[0].type());
    at::Tensor theirs = mine.to(via);
    if (theirs.is_same(mine)) theirs = mine.clone();
    std::vector<at::Tensor> tensors = {theirs};
    group.broadcast(tensors)->wait();
    theirs = tensors[0].to(mine.device());
    int64_t offset = 0;
    for (const Piece& piece : batch) {
      if (first == kNone &&
          !at::equal(theirs.narrow(0, offset, piece.bytes.numel()), piece.bytes)) {
        first = static_cast<int64_t>(piece.tensor);
      }
      offset += piece.bytes.numel();
    }
    batch.clear();
    size = 0;
  };
  for (const Piece& piece : pieces) {
    for (int64_t offset = 0; offset < piece.bytes.numel();) {
      if (size == kChunk || (size > 0 && batch.back().bytes.device() != piece.bytes.device())) {
        compare();
      }
      const int64_t n = std::min(kChunk - size, piece.bytes.numel() - offset);
      batch.push_back({piece.tensor, piece.bytes.narrow(0, offset, n)});
      size += n;
      offset += n;
    }
  }
  compare();
  return first;
}

// The ranks whose first difference is the lowest of all, and that difference.
absl::StatusOr<std::pair<int64_t, std::vector<int>>> Lowest(const GroupPtr& group, int64_t mine) {
  DDP_ASSIGN_OR_RETURN(const std::vector<int64_t> all, AllGather(group, mine));
  std::pair<int64_t, std::vector<int>> lowest;
  lowest.first = *std::min_element(all.begin(), all.end());
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r] == lowest.first) lowest.second.push_back(static_cast<int>(r));
  }
  return lowest;
}

std::string Ranks(const std::vector<int>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

absl::Status Compare(const GroupPtr& group, const NamedTensors& tensors) {
  std::vector<Described> mine;
  for (const auto& [name, tensor] : tensors) {
    mine.push_back({name, Describe(tensor) + (IsComparable(tensor) ? "" : kNotComparable)});
  }
  DDP_ASSIGN_OR_RETURN(const std::vector<Described> first, BroadcastObject(group, mine, 0));
  const auto difference = std::mismatch(mine.begin(), mine.end(), first.begin(), first.end());
  const bool same = difference.first == mine.end() && difference.second == first.end();
  DDP_ASSIGN_OR_RETURN(const auto described,
                       Lowest(group, same ? kNone : difference.first - mine.begin()));

  // Tensors before the first that is described differently may differ in bits.
  const size_t count = std::min<uint64_t>(tensors.size(), described.first);
  for (size_t i = 0; i < count; ++i) {
    if (!absl::EndsWith(mine[i].what, kNotComparable)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("tensor '", mine[i].name, "' is ", mine[i].what));
  }
  DDP_ASSIGN_OR_RETURN(const auto bits,
                       Lowest(group, FirstDifferentBits(*group, Pieces(tensors, count))));

  if (bits.first != kNone) {
    return absl::FailedPreconditionError(
        absl::StrCat("tensor '", first[bits.first].name, "' (", first[bits.first].what,
                     ") differs between ranks: ", Ranks(bits.second),
                     bits.second.size() == 1 ? " does" : " do", " not have rank 0's bits"));
  }
  if (described.first == kNone) return absl::OkStatus();
  // What the lowest of these ranks has instead.
  const auto there = static_cast<size_t>(described.first);
  const Described none = {"", ""};
  DDP_ASSIGN_OR_RETURN(
      const Described theirs,
      BroadcastObject(group, there < mine.size() ? mine[there] : none, described.second[0]));
  const auto text = [](const Described& d) {
    return d == Described() ? std::string("nothing")
                            : absl::StrCat("'", d.name, "' (", d.what, ")");
  };
  return absl::FailedPreconditionError(
      absl::StrCat("tensor ", there,
                   " differs between ranks: ", text(there < first.size() ? first[there] : none),
                   " on rank 0, but ", text(theirs), " on ", Ranks(described.second)));
}

}  // namespace

absl::Status AllAgree(const GroupPtr& group, const NamedTensors& tensors) {
  if (!group || group->getSize() == 1) return absl::OkStatus();
  return CatchStatus("comparing tensors across ranks", [&] { return Compare(group, tensors); });
}

}  // namespace ddp
