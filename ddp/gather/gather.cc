#include "ddp/gather/gather.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/zeros.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "ddp/all_gather.h"
#include "ddp/collective_status.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace ddp {
namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// Below this a message costs its latency, whatever its size.
constexpr int64_t kAlwaysPad = 64 << 10;

// What a rank is about to send.
struct Announcement {
  int64_t code = 0;    // absl::StatusCode; the bytes of a failed rank are its message
  int64_t host = 0;    // bytes
  int64_t device = 0;  // bytes
  int64_t root = 0;    // the argument of the call
};
static_assert(sizeof(Announcement) == 32);

// Where bytes that are in host memory travel: groups of accelerators may have no backend for it.
c10::Device HostDevice(c10d::ProcessGroup& group) {
  const std::vector<c10::Device> types = group.getDeviceTypes();
  const bool has_cpu = types.empty() || std::any_of(types.begin(), types.end(),
                                                    [](c10::Device d) { return d.is_cpu(); });
  return has_cpu ? c10::Device(c10::kCPU) : c10::Device(types[0].type());
}

at::Tensor TextBytes(const std::string& text) {
  at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  if (!text.empty()) std::memcpy(bytes.data_ptr(), text.data(), text.size());
  return bytes;
}

std::string Text(const at::Tensor& bytes) {
  const at::Tensor here = bytes.cpu();
  return std::string(static_cast<const char*>(here.data_ptr()), here.numel());
}

at::Tensor AnnouncementBytes(const Announcement& mine) {
  at::Tensor bytes = at::empty({sizeof(Announcement)}, at::kByte);
  std::memcpy(bytes.data_ptr(), &mine, sizeof(Announcement));
  return bytes;
}

Announcement ToAnnouncement(const at::Tensor& bytes) {
  Announcement announcement;
  std::memcpy(&announcement, bytes.cpu().data_ptr(), sizeof(Announcement));
  return announcement;
}

// Replaces a failed rank's value by its message.
Announcement Announce(absl::StatusOr<EncodedTree>& mine, int root) {
  Announcement announcement;
  announcement.root = root;
  if (!mine.ok()) {
    announcement.code = static_cast<int64_t>(mine.status().code());
    mine = EncodedTree{.host = TextBytes(std::string(mine.status().message())), .device = {}};
  }
  announcement.host = mine->host.numel();
  announcement.device = mine->device.defined() ? mine->device.numel() : 0;
  return announcement;
}

struct Sizes {
  bool Pad() const { return most <= kAlwaysPad || most * Count() <= 2 * total; }
  int64_t Count() const { return static_cast<int64_t>(of_rank.size()); }
  std::vector<int64_t> of_rank;
  int64_t most = 0, total = 0;
};

Sizes SizesOf(const std::vector<Announcement>& all, int64_t Announcement::*member) {
  Sizes sizes;
  for (const Announcement& announcement : all) sizes.of_rank.push_back(announcement.*member);
  sizes.most = *std::max_element(sizes.of_rank.begin(), sizes.of_rank.end());
  sizes.total = std::accumulate(sizes.of_rank.begin(), sizes.of_rank.end(), int64_t{0});
  return sizes;
}

at::Tensor NewBytes(int64_t size, c10::Device device) {
  return at::empty({size}, at::TensorOptions().dtype(at::kByte).device(device));
}

// `mine` may be undefined, of no bytes.
at::Tensor Padded(const at::Tensor& mine, int64_t size, c10::Device device) {
  const int64_t have = mine.defined() ? mine.numel() : 0;
  if (have == size) return mine.to(device);
  at::Tensor padded = NewBytes(size, device);
  if (have > 0) padded.narrow(0, 0, have).copy_(mine);
  padded.narrow(0, have, size - have).zero_();
  return padded;
}

void Trim(std::vector<at::Tensor>& padded, const Sizes& sizes) {
  for (size_t r = 0; r < padded.size(); ++r) padded[r] = padded[r].narrow(0, 0, sizes.of_rank[r]);
}

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

void WaitForAll(const Works& works) {
  for (const auto& work : works) work->wait();
}

std::vector<at::Tensor> AllGatherBytes(c10d::ProcessGroup& group, const at::Tensor& mine,
                                       const Sizes& sizes, c10::Device device) {
  if (sizes.Pad()) {
    if (sizes.most == 0) return std::vector<at::Tensor>(sizes.Count(), NewBytes(0, device));
    std::vector<at::Tensor> all = AllGather(group, Padded(mine, sizes.most, device));
    Trim(all, sizes);
    return all;
  }
  std::vector<at::Tensor> all;
  Works works;
  for (int r = 0; r < sizes.Count(); ++r) {
    const bool here = r == group.getRank() && sizes.of_rank[r] > 0;
    all.push_back(here ? mine.to(device) : NewBytes(sizes.of_rank[r], device));
    if (sizes.of_rank[r] == 0) continue;
    std::vector<at::Tensor> tensors = {all.back()};
    c10d::BroadcastOptions options;
    options.rootRank = r;
    works.push_back(group.broadcast(tensors, options));
  }
  WaitForAll(works);
  return all;
}

std::vector<at::Tensor> GatherBytes(c10d::ProcessGroup& group, const at::Tensor& mine,
                                    const Sizes& sizes, c10::Device device, int dst) {
  const int rank = group.getRank();
  std::vector<at::Tensor> all;
  if (sizes.Pad()) {
    if (rank == dst) {
      for (int r = 0; r < sizes.Count(); ++r) all.push_back(NewBytes(sizes.most, device));
    }
    if (sizes.most == 0) return all;
    std::vector<std::vector<at::Tensor>> outputs;
    if (rank == dst) outputs.push_back(all);
    std::vector<at::Tensor> inputs = {Padded(mine, sizes.most, device)};
    c10d::GatherOptions options;
    options.rootRank = dst;
    group.gather(outputs, inputs, options)->wait();
    Trim(all, sizes);
    return all;
  }
  Works works;
  if (rank != dst) {
    if (sizes.of_rank[rank] > 0) {
      std::vector<at::Tensor> tensors = {mine.to(device)};
      group.send(tensors, dst, /*tag=*/0)->wait();
    }
    return all;
  }
  for (int r = 0; r < sizes.Count(); ++r) {
    const bool here = r == rank && sizes.of_rank[r] > 0;
    all.push_back(here ? mine.to(device) : NewBytes(sizes.of_rank[r], device));
    if (r == rank || sizes.of_rank[r] == 0) continue;
    std::vector<at::Tensor> tensors = {all.back()};
    works.push_back(group.recv(tensors, r, /*tag=*/0));
  }
  WaitForAll(works);
  return all;
}

absl::StatusOr<std::vector<EncodedTree>> Exchange(const GroupPtr& group,
                                                  absl::StatusOr<EncodedTree> mine, int root,
                                                  bool to_all) {
  const c10::Device host = HostDevice(*group), direct(DirectDevice(group));
  std::vector<Announcement> announced;
  const at::Tensor announcement = AnnouncementBytes(Announce(mine, root));
  for (const at::Tensor& theirs : AllGather(*group, announcement.to(host))) {
    announced.push_back(ToAnnouncement(theirs));
  }
  const Sizes host_sizes = SizesOf(announced, &Announcement::host);
  const Sizes device_sizes = SizesOf(announced, &Announcement::device);
  // From here on all ranks know the same, and take the same branches.
  for (size_t r = 0; r < announced.size(); ++r) {
    if (announced[r].code == 0) continue;
    Sizes message;
    message.of_rank.assign(announced.size(), 0);
    message.of_rank[r] = message.most = message.total = announced[r].host;
    const bool is_mine = static_cast<int>(r) == group->getRank();
    const std::string text = Text(
        AllGatherBytes(*group, is_mine ? mine->host : NewBytes(0, at::kCPU), message, host)[r]);
    return absl::Status(static_cast<absl::StatusCode>(announced[r].code),
                        absl::StrCat("rank ", r, ": ", text));
  }
  for (size_t r = 1; r < announced.size(); ++r) {
    if (announced[r].root == announced[0].root) continue;
    return absl::FailedPreconditionError(absl::StrCat("rank 0 gathers to rank ", announced[0].root,
                                                      ", but rank ", r, " to rank ",
                                                      announced[r].root));
  }

  const auto gather = [&](const at::Tensor& bytes, const Sizes& sizes, c10::Device device) {
    return to_all ? AllGatherBytes(*group, bytes, sizes, device)
                  : GatherBytes(*group, bytes, sizes, device, root);
  };
  std::vector<EncodedTree> all;
  for (at::Tensor& bytes : gather(mine->host, host_sizes, host)) {
    all.push_back({.host = bytes.cpu(), .device = {}});
  }
  if (device_sizes.total > 0) {
    std::vector<at::Tensor> bytes = gather(mine->device, device_sizes, direct);
    for (size_t r = 0; r < bytes.size(); ++r) {
      if (device_sizes.of_rank[r] > 0) all[r].device = bytes[r];
    }
  }
  return all;
}

absl::StatusOr<EncodedTree> Broadcast(const GroupPtr& group, absl::StatusOr<EncodedTree> mine,
                                      int src) {
  const c10::Device host = HostDevice(*group), direct(DirectDevice(group));
  const bool is_mine = group->getRank() == src;
  const auto broadcast = [&](const at::Tensor& bytes, int64_t size, c10::Device device) {
    std::vector<at::Tensor> tensors = {is_mine ? bytes.to(device) : NewBytes(size, device)};
    c10d::BroadcastOptions options;
    options.rootRank = src;
    group->broadcast(tensors, options)->wait();
    return tensors[0];
  };
  Announcement announced = is_mine ? Announce(mine, src) : Announcement();
  announced = ToAnnouncement(broadcast(AnnouncementBytes(announced), sizeof(Announcement), host));
  EncodedTree value;
  value.host = is_mine ? mine->host : NewBytes(0, at::kCPU);
  if (announced.host > 0) value.host = broadcast(value.host, announced.host, host).cpu();
  if (announced.code != 0) {
    return absl::Status(static_cast<absl::StatusCode>(announced.code),
                        absl::StrCat("rank ", src, ": ", Text(value.host)));
  }
  if (announced.device > 0) {
    value.device = broadcast(is_mine ? mine->device : at::Tensor(), announced.device, direct);
  }
  return value;
}

absl::Status CheckRank(const GroupPtr& group, const char* name, int rank) {
  const int size = group ? group->getSize() : 1;
  if (rank >= 0 && rank < size) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, "=", rank, " is not a rank: the group has ", size));
}

bool IsAlone(const GroupPtr& group) { return !group || group->getSize() == 1; }

absl::StatusOr<std::vector<EncodedTree>> Alone(absl::StatusOr<EncodedTree> mine) {
  if (!mine.ok()) return mine.status();
  return std::vector<EncodedTree>{*std::move(mine)};
}

using Dict = std::map<std::string, double>;

// The first name that only one of the two has.
absl::Status CheckNames(const Dict& ours, const Dict& theirs, size_t rank) {
  const auto compare = [](const auto& a, const auto& b) { return a.first == b.first; };
  if (std::equal(ours.begin(), ours.end(), theirs.begin(), theirs.end(), compare)) {
    return absl::OkStatus();
  }
  const auto [a, b] =
      std::mismatch(ours.begin(), ours.end(), theirs.begin(), theirs.end(), compare);
  const bool only_ours = b == theirs.end() || (a != ours.end() && a->first < b->first);
  return absl::FailedPreconditionError(absl::StrCat("'", only_ours ? a->first : b->first,
                                                    "' is on rank ", only_ours ? 0 : rank,
                                                    ", but not on rank ", only_ours ? rank : 0));
}

}  // namespace

c10::DeviceType DirectDevice(const GroupPtr& group) {
  if (group) {
    for (const c10::Device device : group->getDeviceTypes()) {
      if (!device.is_cpu()) return device.type();
    }
  }
  return c10::DeviceType::CPU;
}

bool IsSource(const GroupPtr& group, int src) { return src == (group ? group->getRank() : 0); }

absl::StatusOr<std::vector<EncodedTree>> AllGatherEncoded(const GroupPtr& group,
                                                          absl::StatusOr<EncodedTree> mine) {
  if (IsAlone(group)) return Alone(std::move(mine));
  return CatchCollective("gathering values on all ranks",
                         [&] { return Exchange(group, std::move(mine), /*root=*/-1, true); });
}

absl::StatusOr<std::vector<EncodedTree>> GatherEncoded(const GroupPtr& group,
                                                       absl::StatusOr<EncodedTree> mine, int dst) {
  // Only this rank may have got it wrong: the others wait for what it sends.
  if (absl::Status valid = CheckRank(group, "dst", dst); !valid.ok()) mine = std::move(valid);
  if (IsAlone(group)) return Alone(std::move(mine));
  return CatchCollective(absl::StrCat("gathering values on rank ", dst),
                         [&] { return Exchange(group, std::move(mine), dst, false); });
}

absl::StatusOr<EncodedTree> BroadcastEncoded(const GroupPtr& group,
                                             absl::StatusOr<EncodedTree> mine, int src) {
  DDP_RETURN_IF_ERROR(CheckRank(group, "src", src));
  if (IsAlone(group)) return mine;
  return CatchCollective(absl::StrCat("broadcasting a value from rank ", src),
                         [&] { return Broadcast(group, std::move(mine), src); });
}

absl::StatusOr<Dict> ReduceDict(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                const Dict& scalars, DictReduction reduction) {
  DDP_ASSIGN_OR_RETURN(const std::vector<Dict> all, AllGather(group, scalars));
  for (size_t r = 1; r < all.size(); ++r) DDP_RETURN_IF_ERROR(CheckNames(all[0], all[r], r));
  Dict result = all[0];
  for (auto& [name, value] : result) {
    for (size_t r = 1; r < all.size(); ++r) value += all[r].at(name);
    if (reduction == DictReduction::kMean) value /= static_cast<double>(all.size());
  }
  return result;
}

}  // namespace ddp
