#include "ddp/buffer_broadcast.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "c10/util/Exception.h"
#include "ddp/collective_status.h"

namespace ddp {
namespace {

int64_t VersionOf(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

void RaiseVersion(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// A hash of dtypes and sizes. FNV-1a, of numbers instead of bytes.
uint64_t LayoutOf(const std::vector<at::Tensor>& tensors) {
  uint64_t hash = 14695981039346656037ull;
  const auto add = [&hash](int64_t number) {
    hash = (hash ^ static_cast<uint64_t>(number)) * 1099511628211ull;
  };
  for (const at::Tensor& tensor : tensors) {
    add(static_cast<int64_t>(tensor.scalar_type()));
    add(tensor.dim());
    for (const int64_t size : tensor.sizes()) add(size);
  }
  return hash;
}

std::string ShapeOf(const at::Tensor& tensor) {
  return absl::StrCat(c10::toString(tensor.scalar_type()), " [",
                      absl::StrJoin(tensor.sizes(), ", "), "]");
}

bool IsPlainMemory(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

void Pack(const std::vector<at::Tensor>& tensors, uint8_t* to) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    const at::Tensor plain =
        IsPlainMemory(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous();
    std::memcpy(to, plain.const_data_ptr(), plain.nbytes());
    to += plain.nbytes();
  }
}

// Raises no version.
void Unpack(const uint8_t* from, const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    if (IsPlainMemory(tensor)) {
      std::memcpy(tensor.mutable_data_ptr(), from, tensor.nbytes());
    } else {
      const at::Tensor plain = at::empty(tensor.sizes(), tensor.options());
      std::memcpy(plain.mutable_data_ptr(), from, plain.nbytes());
      tensor.variable_data().copy_(plain);
    }
    from += tensor.numel() * tensor.element_size();
  }
}

void Broadcast(c10d::ProcessGroup& group, at::Tensor& message, int source) {
  std::vector<at::Tensor> messages = {message};
  c10d::BroadcastOptions options;
  options.rootRank = source;
  group.broadcast(messages, options)->wait();
}

}  // namespace

BufferBroadcast::BufferBroadcast(c10::intrusive_ptr<c10d::ProcessGroup> group, NamedTensors buffers,
                                 bool verified)
    : group_(std::move(group)),
      buffers_(std::move(buffers)),
      verified_(verified),
      versions_(buffers_.size(), -1) {}

void BufferBroadcast::Run(int source) {
  const c10::NoGradGuard no_grad;
  if (!verified_) {  // also without buffers: other ranks may have some
    const absl::Status same = VerifySameModel(*group_, buffers_);
    if (IsFromCollective(same)) C10_THROW_ERROR(DistBackendError, std::string(same.message()));
    TORCH_CHECK(same.ok(), std::string(same.message()));
    verified_ = true;
  }
  std::vector<size_t> left(buffers_.size());
  std::iota(left.begin(), left.end(), size_t{0});
  while (!left.empty()) {
    const c10::Device device = buffers_[left[0]].second.device();
    const auto others = std::stable_partition(left.begin(), left.end(), [&](size_t index) {
      return buffers_[index].second.device() == device;
    });
    const std::vector<size_t> indices(left.begin(), others);
    left.erase(left.begin(), others);
    if (device.is_cpu()) {
      OnCpu(indices, source);
    } else {
      OnAccelerator(indices, source);
    }
    for (const size_t index : indices) versions_[index] = VersionOf(buffers_[index].second);
  }
}

// A message: the layout of the source's buffers; for each one byte, whether its version is new; and
// their contents, if the layout is the one that all ranks had at the Run before. So its size is the
// same on all ranks, also where a buffer has changed on some.
void BufferBroadcast::OnCpu(const std::vector<size_t>& indices, int source) {
  const bool is_source = group_->getRank() == source;
  std::vector<at::Tensor> stored;
  int64_t bytes = 0;
  for (const size_t index : indices) {
    stored.push_back(StoredOf(index));
    bytes += stored.back().numel() * stored.back().element_size();
  }
  const uint64_t layout = LayoutOf(stored);
  if (shapes_.empty()) Agree(indices, layout, bytes);
  const int64_t header = static_cast<int64_t>(sizeof(layout) + indices.size());
  at::Tensor message = at::empty({header + bytes_}, at::kByte);
  auto* data = message.mutable_data_ptr<uint8_t>();
  uint8_t* is_new = data + sizeof(layout);
  if (is_source) {
    std::memcpy(data, &layout, sizeof(layout));
    for (size_t i = 0; i < indices.size(); ++i) is_new[i] = IsNewVersion(indices[i]);
    if (layout == layout_) Pack(stored, data + header);
  }
  Broadcast(*group_, message, source);
  uint64_t theirs = 0;
  std::memcpy(&theirs, data, sizeof(theirs));
  TORCH_CHECK(theirs == layout, "rank ", group_->getRank(), ": the buffers differ from rank ",
              source, "'s, which are broadcast: ", Changes(indices),
              "; change the shape of a buffer on all ranks alike, or name it in `ignored`");
  const uint8_t* contents = data + header;
  at::Tensor second;
  if (layout != layout_) {
    second = at::empty({bytes}, at::kByte);
    if (is_source) Pack(stored, second.mutable_data_ptr<uint8_t>());
    Broadcast(*group_, second, source);
    contents = second.const_data_ptr<uint8_t>();
    Agree(indices, layout, bytes);
  }
  if (is_source) return;
  Unpack(contents, stored);
  for (size_t i = 0; i < indices.size(); ++i) {
    if (is_new[i] != 0 || IsNewVersion(indices[i])) RaiseVersion(buffers_[indices[i]].second);
  }
}

void BufferBroadcast::OnAccelerator(const std::vector<size_t>& indices, int source) {
  std::vector<at::Tensor> stored, bytes;
  for (const size_t index : indices) {
    stored.push_back(StoredOf(index));
    bytes.push_back(stored.back().contiguous().flatten().view(at::kByte));
  }
  at::Tensor message = at::cat(bytes);
  Broadcast(*group_, message, source);
  if (group_->getRank() == source) return;
  int64_t offset = 0;
  for (size_t i = 0; i < stored.size(); ++i) {
    const int64_t size = bytes[i].numel();
    // A clone is aligned for any dtype; a slice of bytes is not.
    const at::Tensor theirs = message.narrow(0, offset, size).clone();
    stored[i].variable_data().copy_(theirs.view(stored[i].scalar_type()).view(stored[i].sizes()));
    if (IsNewVersion(indices[i])) RaiseVersion(buffers_[indices[i]].second);
    offset += size;
  }
}

at::Tensor BufferBroadcast::StoredOf(size_t index) const {
  const auto& [name, buffer] = buffers_[index];
  TORCH_CHECK(buffer.layout() == at::kStrided, "buffer '", name,
              "' is not a dense tensor, and cannot be broadcast: name it in `ignored`");
  return Stored(buffer);
}

bool BufferBroadcast::IsNewVersion(size_t index) const {
  return VersionOf(buffers_[index].second) != versions_[index];
}

void BufferBroadcast::Agree(const std::vector<size_t>& indices, uint64_t layout, int64_t bytes) {
  layout_ = layout;
  bytes_ = bytes;
  shapes_.clear();
  for (const size_t index : indices) shapes_.push_back(ShapeOf(buffers_[index].second));
}

std::string BufferBroadcast::Changes(const std::vector<size_t>& indices) const {
  std::vector<std::string> changes;
  for (size_t i = 0; i < indices.size() && i < shapes_.size(); ++i) {
    const auto& [name, buffer] = buffers_[indices[i]];
    const std::string now = ShapeOf(buffer);
    if (now == shapes_[i]) continue;
    changes.push_back(absl::StrCat("'", name, "' is ", now, " here, and was ", shapes_[i]));
  }
  return changes.empty() ? "theirs have changed, and these have not" : absl::StrJoin(changes, ", ");
}

}  // namespace ddp
