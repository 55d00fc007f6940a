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
#include "base/xxh3.h"
#include "ddp/collective_status.h"
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
  // It has no sizes: asking would throw, and leave the other ranks waiting.
  if (tensor.is_nested()) return "nested";
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
    return tree_internal::NotPlainReason(part).empty();
  });
}

// Part of a message: bytes of the tensor at this position in the list.
struct Piece {
  size_t tensor;
  at::Tensor bytes;
};

// The first tensor that does not have rank 0's bits; kNone on rank 0.
class Comparison {
 public:
  explicit Comparison(c10d::ProcessGroup& group)
      : group_(group), devices_(group.getDeviceTypes()) {}

  // The same dense tensors in the same order on all ranks; kinds of devices and sizes are equal.
  void Add(size_t tensor, const at::Tensor& part) {
    if (part.numel() == 0) return;
    // A copy, if at all, of one tensor at a time.
    const at::Tensor bytes =
        tree_internal::AsBytes(part.detach().resolve_conj().resolve_neg().contiguous());
    for (int64_t offset = 0; offset < bytes.numel();) {
      // Ranks may have other indices of devices.
      const bool elsewhere =
          !batch_.empty() && batch_.back().bytes.device().type() != bytes.device().type();
      if (size_ == kChunk || elsewhere) Compare();
      const int64_t n = std::min(kChunk - size_, bytes.numel() - offset);
      batch_.push_back({tensor, bytes.narrow(0, offset, n)});
      size_ += n;
      offset += n;
    }
  }

  int64_t Finish() {
    Compare();
    return first_;
  }

 private:
  bool Serves(c10::Device device) const {
    return devices_.empty() || std::any_of(devices_.begin(), devices_.end(), [&](c10::Device d) {
             return d.type() == device.type();
           });
  }

  // Small tensors share a message.
  void Compare() {
    if (batch_.empty()) return;
    const c10::Device here = batch_[0].bytes.device();
    const c10::Device via = Serves(here) ? here : c10::Device(devices_[0].type());
    const bool is_source = group_.getRank() == 0;
    std::vector<at::Tensor> message;
    if (is_source) {
      std::vector<at::Tensor> parts;
      for (const Piece& piece : batch_) parts.push_back(piece.bytes.to(here));
      message = {at::cat(parts).to(via)};
    } else {
      message = {at::empty({size_}, at::TensorOptions(via).dtype(at::kByte))};
    }
    group_.broadcast(message)->wait();
    int64_t offset = 0;
    for (const Piece& piece : batch_) {
      if (is_source || first_ != kNone) break;
      const int64_t n = piece.bytes.numel();
      const at::Tensor theirs = message[0].narrow(0, offset, n).to(piece.bytes.device());
      if (!at::equal(theirs, piece.bytes)) first_ = static_cast<int64_t>(piece.tensor);
      offset += n;
    }
    batch_.clear();
    size_ = 0;
  }

  c10d::ProcessGroup& group_;
  const std::vector<c10::Device> devices_;
  std::vector<Piece> batch_;
  int64_t size_ = 0;  // of the batch, in bytes
  int64_t first_ = kNone;
};

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

int64_t DigestOf(const at::Tensor& tensor) {
  uint64_t digest = 0;
  for (const at::Tensor& part : Parts(tensor)) {
    const at::Tensor bytes =
        tree_internal::AsBytes(part.detach().resolve_conj().resolve_neg().contiguous()).cpu();
    digest = digest * 31 + Xxh3(bytes.const_data_ptr(), bytes.nbytes());
  }
  return static_cast<int64_t>(digest);
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
  Comparison comparison(*group);
  for (size_t i = 0; i < count; ++i) {
    for (const at::Tensor& part : Parts(tensors[i].second)) comparison.Add(i, part);
  }
  DDP_ASSIGN_OR_RETURN(const auto bits, Lowest(group, comparison.Finish()));
  if (bits.first != kNone) {
    std::string hint;
    // Rank 0 may be the one that is wrong.
    if (bits.second.size() > 1 && static_cast<int>(bits.second.size()) + 1 == group->getSize()) {
      DDP_ASSIGN_OR_RETURN(const std::vector<int64_t> digests,
                           AllGather(group, DigestOf(tensors[bits.first].second)));
      if (std::all_of(digests.begin() + 1, digests.end(),
                      [&](int64_t digest) { return digest == digests[1]; })) {
        hint = "; they have the same, and rank 0 alone has others";
      }
    }
    return absl::FailedPreconditionError(
        absl::StrCat("tensor '", first[bits.first].name, "' (", first[bits.first].what,
                     ") differs between ranks: ", Ranks(bits.second),
                     bits.second.size() == 1 ? " does" : " do", " not have rank 0's bits", hint));
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
  return CatchCollective("comparing tensors across ranks", [&] { return Compare(group, tensors); });
}

}  // namespace ddp
