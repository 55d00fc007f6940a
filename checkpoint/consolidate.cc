#include "checkpoint/consolidate.h"

#include <ATen/Functions.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue_inl.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/json.h"
#include "base/status.h"
#include "checkpoint/cover.h"
#include "checkpoint/crc32.h"
#include "checkpoint/outcomes.h"
#include "checkpoint/parts.h"
#include "checkpoint/shared_reader.h"
#include "checkpoint/tree_json.h"

namespace ddp::checkpoint {
namespace {

constexpr int64_t kChunk = 4 << 20;  // bytes of one message through the coordinator
// Tensors up to this size in bytes are sent in groups; a group has at most kChunk bytes over all
// ranks. Formats ask for tensors rank by rank, or dtype by dtype, so that rank 0 keeps the last
// kGroupsHeld groups.
constexpr int64_t kSmallTensor = 64 << 10;
constexpr size_t kGroupsHeld = 16;

at::Tensor BytesOf(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
  if (dense.numel() == 0) return at::empty({0}, at::kByte);
  return dense.reshape({-1}).view(at::kByte);
}

// Collective.
absl::Status MoveThroughCoordinator(const Coordinator& ranks, int from, int64_t size,
                                    const at::Tensor& bytes) {
  for (int64_t at = 0; at < size; at += kChunk) {
    const auto chunk = static_cast<size_t>(std::min(kChunk, size - at));
    std::string message;
    if (ranks.rank() == from) {
      message.assign(static_cast<const char*>(bytes.const_data_ptr()) + at, chunk);
    }
    DDP_ASSIGN_OR_RETURN(const std::vector<std::string> all, ranks.AllGather(message));
    if (ranks.rank() != 0) continue;
    const std::string& received = all[static_cast<size_t>(from)];
    if (received.size() != chunk) {
      return absl::InternalError(absl::StrCat("rank ", from, " sent ", received.size(),
                                              " bytes of a tensor instead of ", chunk));
    }
    std::memcpy(static_cast<char*>(bytes.mutable_data_ptr()) + at, received.data(), chunk);
  }
  return absl::OkStatus();
}

int64_t NumberOf(const std::vector<int64_t>& shape) {
  int64_t elements = 1;
  for (int64_t size : shape) elements *= size;
  return elements;
}

// Bytes of a part.
int64_t SizeOf(const Shard& shard, const std::string& dtype) {
  const auto width = static_cast<int64_t>(c10::elementSize(DtypeOfName(dtype)));
  return NumberOf(LocalShape(shard)) * width;
}

// Copies the dicts of a tree, so that entries can be added to them.
c10::IValue WithOwnDicts(const c10::IValue& value) {
  if (!value.isGenericDict()) return value;
  c10::impl::GenericDict copy = value.toGenericDict().copy();
  for (const auto& entry : copy) entry.setValue(WithOwnDicts(entry.value()));
  return copy;
}

using ByStorage = std::map<const c10::StorageImpl*, at::Tensor>;

// `value`, with the tensors in it that are a key of `values` replaced by its value. Dicts and lists
// are changed in place.
c10::IValue FilledIn(const c10::IValue& value, const ByStorage& values) {
  if (value.isTensor() && value.toTensor().has_storage()) {
    const auto found = values.find(value.toTensor().storage().unsafeGetStorageImpl());
    return found == values.end() ? value : found->second;
  }
  if (value.isGenericDict()) {
    const c10::impl::GenericDict dict = value.toGenericDict();
    for (const auto& entry : dict) {
      c10::IValue filled = FilledIn(entry.value(), values);
      if (!filled.is(entry.value())) entry.setValue(std::move(filled));
    }
  } else if (value.isList()) {
    c10::impl::GenericList list = value.toList();
    for (size_t i = 0; i < list.size(); ++i) {
      const c10::IValue element = list.get(i);
      c10::IValue filled = FilledIn(element, values);
      if (!filled.is(element)) list.set(i, std::move(filled));
    }
  } else if (value.isTuple()) {
    std::vector<c10::IValue> elements = value.toTupleRef().elements().vec();
    bool changes = false;
    for (c10::IValue& element : elements) {
      c10::IValue filled = FilledIn(element, values);
      changes = changes || !filled.is(element);
      element = std::move(filled);
    }
    if (changes) return c10::ivalue::Tuple::create(std::move(elements));
  }
  return value;
}

}  // namespace

absl::StatusOr<c10::impl::GenericDict> ListsOfRanks(
    const std::vector<c10::impl::GenericDict>& by_rank, MissingEntry missing) {
  c10::impl::GenericDict by_key = NewTree();
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (const auto& entry : by_rank[rank]) {
      if (by_key.contains(entry.key())) continue;
      c10::impl::GenericList values(c10::AnyType::get());
      for (size_t other = 0; other < by_rank.size(); ++other) {
        const auto found = by_rank[other].find(entry.key());
        if (found != by_rank[other].end()) {
          values.push_back(found->value());
        } else if (missing == MissingEntry::kNone) {
          values.push_back(c10::IValue());
        } else {
          return absl::InvalidArgumentError(
              absl::StrCat("rank ", other, " has no entry of its own under '", KeyText(entry.key()),
                           "', and rank ", rank, " has one"));
        }
      }
      by_key.insert(entry.key(), values);
    }
  }
  return by_key;
}

absl::StatusOr<std::unique_ptr<Gathering>> Gathering::Begin(State state, const Coordinator& ranks,
                                                            MoveToRank0 move) {
  std::unique_ptr<Gathering> gathering(new Gathering(std::move(state), ranks, std::move(move)));
  State& mine = gathering->state_;
  if (mine.sharded.empty() && mine.per_rank.empty()) return gathering;
  if (ranks.rank() == 0) mine.root = WithOwnDicts(mine.root).toGenericDict();
  const bool has_shards = !mine.sharded.empty(), has_entries = !mine.per_rank.empty();
  DDP_ASSIGN_OR_RETURN(
      const std::vector<std::string> all,
      ranks.AllGather(absl::StrCat(has_shards ? "parts" : "", has_entries ? " entries" : "")));
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank, " saves", all[rank].empty() ? " nothing of its own" : all[rank],
                     " where rank 0 saves ", all[0]));
  }
  if (has_shards) DDP_RETURN_IF_ERROR(gathering->FindParts());
  if (has_entries) DDP_RETURN_IF_ERROR(gathering->TakePerRankEntries());
  return gathering;
}

// Collective.
absl::Status Gathering::FindParts() {
  DDP_RETURN_IF_ERROR(ranks_.Agree(CheckShards(state_)));
  DDP_ASSIGN_OR_RETURN(auto all, GatherParts(PartsOf(state_), ranks_));
  for (auto& [path, parts] : all) tensors_.push_back({path, std::move(parts)});
  own_ = std::exchange(state_.sharded, {});
  const auto make_places = [&]() -> absl::Status {
    if (ranks_.rank() != 0) return absl::OkStatus();
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const std::string& path = tensors_[i].path;
      const PartsOfRanks& parts = tensors_[i].parts;
      at::Tensor place;
      DDP_ASSIGN_OR_RETURN(const std::optional<c10::IValue> found, FindAt(state_.root, path));
      if (found) {
        place = found->toTensor();  // as CheckShards has made sure
      } else {
        place = at::empty(
            parts.shards.front().shard.global_shape,
            at::TensorOptions().dtype(DtypeOfName(parts.dtype)).device(c10::DeviceType::Meta));
        DDP_RETURN_IF_ERROR(InsertAt(state_.root, path, place));
      }
      if (!by_storage_.emplace(place.storage().unsafeGetStorageImpl(), i).second) {
        return absl::InvalidArgumentError(
            absl::StrCat("sharded tensor '", path, "': its place in the state is another's, too"));
      }
      places_.push_back(std::move(place));
    }
    return absl::OkStatus();
  };
  return ranks_.Agree(CatchStatus("gathering sharded tensors", make_places));
}

// Collective. Each rank tells all others of its entries, without the values of tensors. These are
// sent as those in parts are, each as one part that is whole, or in groups.
absl::Status Gathering::TakePerRankEntries() {
  std::vector<at::Tensor> mine;
  int64_t in_group = 0;  // bytes of the last group
  const auto describe = [&]() -> absl::StatusOr<std::string> {
    const auto own = state_.per_rank.find(ranks_.rank());
    if (own == state_.per_rank.end() || state_.per_rank.size() != 1) {
      return absl::InvalidArgumentError("per-rank entries must be those of the rank itself");
    }
    if (state_.root.contains(kPerRankEntries)) {
      return absl::InvalidArgumentError(
          absl::StrCat("the state has a value '", kPerRankEntries, "', where per-rank entries go"));
    }
    nlohmann::json tensors = nlohmann::json::array();
    const auto add = [&](const std::string& path,
                         const at::Tensor& tensor) -> absl::StatusOr<std::string> {
      const std::string dtype = tensor.defined() ? DtypeName(tensor.scalar_type()) : "";
      if (dtype.empty() || tensor.layout() != at::kStrided) {
        return absl::InvalidArgumentError(
            absl::StrCat("'", path, "' is a tensor that checkpoints cannot hold"));
      }
      mine.push_back(tensor.detach().resolve_conj().resolve_neg());
      tensors.push_back({dtype, tensor.sizes().vec()});
      return absl::StrCat(tensors.size() - 1);
    };
    DDP_ASSIGN_OR_RETURN(nlohmann::json tree, TreeToJson(own->second, add));
    return nlohmann::json{{"tree", std::move(tree)}, {"tensors", tensors}}.dump();
  };
  const absl::StatusOr<std::string> described =
      CatchStatus("gathering the ranks' entries", describe);
  DDP_RETURN_IF_ERROR(ranks_.Agree(described.status()));
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> all, ranks_.AllGather(*described));
  state_.per_rank.clear();
  std::vector<c10::impl::GenericDict> by_rank;  // on rank 0
  const auto take = [&](int rank) -> absl::Status {
    DDP_ASSIGN_OR_RETURN(const nlohmann::json told,
                         ParseJson(all[static_cast<size_t>(rank)],
                                   {.depth = 4 * static_cast<size_t>(kMaxTreeDepth) + 8}));
    std::vector<at::Tensor> places;  // on rank 0
    size_t index = 0, offset = 0;
    for (const nlohmann::json& one : told.at("tensors")) {
      const auto dtype = one[0].get<std::string>();
      const auto shape = one[1].get<std::vector<int64_t>>();
      const std::string path = absl::StrCat(kPerRankEntries, ", tensor ", index, " of rank ", rank);
      if (rank == ranks_.rank()) {
        own_[path] = {.global_shape = shape,
                      .dtype = DtypeOfName(dtype),
                      .parts = {{Whole{}, mine.at(index)}}};
      }
      ++index;
      tensors_.push_back({path, {dtype, {{rank, Shard{.global_shape = shape}}}}});
      const int64_t size = SizeOf(tensors_.back().parts.shards[0].shard, dtype);
      if (rank != 0 && size <= kSmallTensor) {
        if (groups_.empty() || in_group + size > kChunk) {
          groups_.emplace_back();
          in_group = 0;
          offset = 0;
        }
        tensors_.back().in_group = {groups_.size() - 1, offset};
        groups_.back().push_back(tensors_.size() - 1);
        in_group += size;
        offset += static_cast<size_t>(size);
      }
      if (ranks_.rank() != 0) continue;
      places.push_back(at::empty(
          shape, at::TensorOptions().dtype(DtypeOfName(dtype)).device(c10::DeviceType::Meta)));
      by_storage_.emplace(places.back().storage().unsafeGetStorageImpl(), tensors_.size() - 1);
      places_.push_back(places.back());
    }
    if (ranks_.rank() != 0) return absl::OkStatus();
    const auto place_of = [&](const std::string& name) -> absl::StatusOr<c10::IValue> {
      size_t index = 0;
      if (absl::SimpleAtoi(name, &index) && index < places.size()) {
        return c10::IValue(places[index]);
      }
      return absl::InternalError("a rank's entries name a tensor that it has not");
    };
    DDP_ASSIGN_OR_RETURN(const c10::IValue entries, TreeFromJson(told.at("tree"), place_of));
    by_rank.push_back(entries.toGenericDict());
    return absl::OkStatus();
  };
  const auto take_all = [&]() -> absl::Status {
    for (int rank = 0; rank < ranks_.size(); ++rank) DDP_RETURN_IF_ERROR(take(rank));
    if (ranks_.rank() != 0) return absl::OkStatus();
    DDP_ASSIGN_OR_RETURN(const c10::impl::GenericDict lists,
                         ListsOfRanks(by_rank, MissingEntry::kRefused));
    state_.root.insert(kPerRankEntries, lists);
    return absl::OkStatus();
  };
  return ranks_.Agree(CatchStatus("gathering the ranks' entries", take_all));
}

// Collective: the bytes of a part from the rank that has it.
absl::Status Gathering::Move(const Sharded& tensor, const RankShard& shard,
                             const at::Tensor& bytes) const {
  if (move_) return CatchStatus("", [&] { return move_(shard.rank, bytes); });
  return MoveThroughCoordinator(ranks_, shard.rank, SizeOf(shard.shard, tensor.parts.dtype), bytes);
}

// On another rank than 0: its part in TensorSource::Get. All moves are made even if its own values
// cannot be had: rank 0 waits for them.
absl::Status Gathering::Send(const Sharded& tensor) const {
  absl::Status mine;
  size_t next = 0;
  for (const RankShard& shard : tensor.parts.shards) {
    const size_t index = shard.rank == ranks_.rank() ? next++ : 0;
    const int64_t elements = NumberOf(LocalShape(shard.shard));
    if (shard.rank == 0 || elements == 0) continue;
    at::Tensor bytes;
    if (shard.rank == ranks_.rank()) {
      mine.Update(CatchStatus(absl::StrCat("sending '", tensor.path, "' to rank 0"),
                              [&] { bytes = BytesOf(own_.at(tensor.path).parts[index].tensor); }));
      if (!bytes.defined()) {
        bytes = at::zeros({SizeOf(shard.shard, tensor.parts.dtype)}, at::kByte);
      }
    }
    DDP_RETURN_IF_ERROR(Move(tensor, shard, bytes));
  }
  return mine;
}

// The same of a group. The message has its size even if values cannot be had.
absl::Status Gathering::SendGroup(size_t group) const {
  absl::Status mine;
  std::string message;
  for (const size_t index : groups_[group]) {
    const Sharded& tensor = tensors_[index];
    const RankShard& whole = tensor.parts.shards[0];
    if (whole.rank != ranks_.rank()) continue;
    const auto size = static_cast<size_t>(SizeOf(whole.shard, tensor.parts.dtype));
    message.resize(tensor.in_group->offset + size);
    mine.Update(CatchStatus(absl::StrCat("sending '", tensor.path, "' to rank 0"), [&] {
      const at::Tensor bytes = BytesOf(own_.at(tensor.path).parts[0].tensor);
      if (size > 0) std::memcpy(&message[tensor.in_group->offset], bytes.const_data_ptr(), size);
    }));
  }
  DDP_RETURN_IF_ERROR(ranks_.Gather(message).status());
  return mine;
}

// On rank 0. Before it takes what others have, it tells them of which tensor, and they tell it of
// failures.
class Gathering::Source final : public TensorSource {
 public:
  explicit Source(const Gathering& gathering) : gathering_(gathering) {}

  bool Has(const c10::Storage& storage) const override {
    return gathering_.by_storage_.contains(storage.unsafeGetStorageImpl());
  }

  absl::StatusOr<at::Tensor> Get(const c10::Storage& storage) override {
    if (!ended_.ok()) return ended_;
    const size_t index = gathering_.by_storage_.at(storage.unsafeGetStorageImpl());
    const Sharded& tensor = gathering_.tensors_[index];
    const at::Tensor& place = gathering_.places_[index];
    const at::ScalarType dtype = place.scalar_type();
    if (tensor.in_group) return GetSmall(index);
    // All memory is taken before the others begin to send.
    const at::Tensor whole = at::empty_strided(place.sizes(), place.strides(), dtype);
    std::vector<at::Tensor> targets;  // by shard; undefined: through `buffer`
    int64_t buffer_size = 0;
    for (const auto& [from, shard] : tensor.parts.shards) {
      targets.push_back(from == 0 ? at::Tensor() : PieceOf(whole, shard));
      if (from == 0 || targets.back().defined()) continue;
      buffer_size = std::max(buffer_size, NumberOf(LocalShape(shard)));
    }
    const at::Tensor buffer = at::empty({buffer_size}, whole.options());

    const auto is_others = [](const RankShard& shard) { return shard.rank != 0; };
    if (absl::c_any_of(tensor.parts.shards, is_others)) DDP_RETURN_IF_ERROR(RequestShards(index));
    for (size_t i = 0; i < targets.size(); ++i) {
      const auto& [from, shard] = tensor.parts.shards[i];
      const std::vector<int64_t> local = LocalShape(shard);
      const int64_t elements = NumberOf(local);
      if (from == 0 || elements == 0) continue;
      const bool direct = targets[i].defined();
      const at::Tensor values = direct ? targets[i] : buffer.narrow(0, 0, elements).view(local);
      ended_ =
          gathering_.Move(tensor, tensor.parts.shards[i], values.view({elements}).view(at::kByte));
      if (!ended_.ok()) return ended_;
      if (!direct) CopyPart(values, shard.part, shard.memory_order, whole);
    }
    // A copy from a device may fail: after what the others have sent.
    const auto own = gathering_.own_.find(tensor.path);
    if (own == gathering_.own_.end()) return whole;
    for (const TensorPart& part : own->second.parts) {
      if (part.tensor.numel() == 0) continue;
      CopyPart(part.tensor.cpu(), part.part, own->second.memory_order, whole);
    }
    return whole;
  }

  // Ends the others' part. `written`: what came of the write here; the result is this rank's own.
  absl::Status End(const absl::Status& written) {
    if (is_others_) return absl::OkStatus();
    // It may have been the other's last part that failed: then that rank says so.
    (void)gathering_.ranks_.Broadcast(ended_.ok() ? absl::StatusOr<std::string>("") : ended_);
    return written;
  }

 private:
  // Collective: the other ranks send their shards of the tensor, or of its group, next.
  absl::Status RequestShards(size_t index) {
    ended_ = gathering_.ranks_.Broadcast(absl::StrCat(index)).status();
    is_others_ = !ended_.ok();
    return ended_;
  }

  // Asks for the tensor's group, unless it is held.
  absl::StatusOr<at::Tensor> GetSmall(size_t index) {
    const Sharded& tensor = gathering_.tensors_[index];
    const RankShard& shard = tensor.parts.shards[0];
    const at::Tensor& place = gathering_.places_[index];
    const size_t group = tensor.in_group->group, offset = tensor.in_group->offset;
    const auto is_it = [&](const Group& held) { return held.number == group; };
    auto found = absl::c_find_if(held_, is_it);
    if (found == held_.end()) {
      DDP_RETURN_IF_ERROR(RequestShards(index));
      if (held_.size() == kGroupsHeld) held_.pop_front();
      absl::StatusOr<std::vector<std::string>> all = gathering_.ranks_.Gather("");
      ended_ = all.status();
      if (!ended_.ok()) return ended_;
      held_.push_back({group, *std::move(all)});
      found = std::prev(held_.end());
    }
    const std::string& message = found->by_rank.at(static_cast<size_t>(shard.rank));
    const at::Tensor whole = at::empty(place.sizes(), place.scalar_type());
    if (message.size() < offset + whole.nbytes()) {
      return absl::InternalError(absl::StrCat("rank ", shard.rank, " sent ", message.size(),
                                              " bytes of small tensors, too few"));
    }
    if (whole.nbytes() > 0) {
      std::memcpy(whole.mutable_data_ptr(), message.data() + offset, whole.nbytes());
    }
    return whole;
  }

  // Where the values of a part are in `whole`, if that is one piece of memory in their order; else
  // undefined.
  static at::Tensor PieceOf(const at::Tensor& whole, const Shard& shard) {
    at::Tensor view = whole;
    if (std::holds_alternative<FlatRange>(shard.part)) {
      if (!shard.memory_order.empty()) view = whole.permute(shard.memory_order);
      if (!view.is_contiguous()) return {};
      view = view.view({-1});
    }
    view = PartOf(view, shard.part, {});
    return view.is_contiguous() ? view : at::Tensor();
  }

  struct Group {
    size_t number;
    std::vector<std::string> by_rank;
  };

  const Gathering& gathering_;
  std::deque<Group> held_;  // the newest last
  absl::Status ended_;      // why no more tensors come
  bool is_others_ = false;  // the error is another rank's, or the ranks cannot be asked
};

// On other ranks than 0, until that has ended.
absl::Status Gathering::SendAll() const {
  absl::Status mine;
  for (;;) {
    const absl::StatusOr<std::string> next =
        ranks_.Broadcast(mine.ok() ? absl::StatusOr<std::string>("") : mine);
    size_t index = 0;
    if (!next.ok() || next->empty()) return mine;
    if (!absl::SimpleAtoi(*next, &index) || index >= tensors_.size()) {
      return absl::InternalError("rank 0 asks for a tensor that there is not");
    }
    const std::optional<InGroup>& small = tensors_[index].in_group;
    mine.Update(small ? SendGroup(small->group) : Send(tensors_[index]));
  }
}

absl::StatusOr<Outcomes> Gathering::Run(absl::FunctionRef<absl::Status(TensorSource* source)> write,
                                        absl::string_view what) {
  absl::Status mine;
  if (ranks_.rank() == 0) {
    Source source(*this);
    mine = source.End(CatchStatus("", [&] { return write(&source); }));
  } else {
    mine = CatchStatus("", [&] { return SendAll(); });
  }
  if (!mine.ok()) return GatherOutcomes(ranks_, Annotate(mine, what));
  return GatherOutcomes(ranks_, "");
}

absl::Status Gathering::Give(absl::FunctionRef<absl::Status(TensorSource* source)> take) {
  DDP_ASSIGN_OR_RETURN(const Outcomes given, Run(take, "gathering tensors"));
  return FirstFailure(given);
}

absl::Status Gathering::MakeWhole() {
  if (!has_parts()) return absl::OkStatus();
  const auto fill = [&](TensorSource* source) -> absl::Status {
    ByStorage values;
    for (const at::Tensor& place : places_) {
      DDP_ASSIGN_OR_RETURN(values[place.storage().unsafeGetStorageImpl()],
                           source->Get(place.storage()));
    }
    (void)FilledIn(state_.root, values);
    return absl::OkStatus();
  };
  const absl::Status filled = Give(fill);
  tensors_.clear();
  own_.clear();
  return filled;
}

absl::StatusOr<State> Consolidate(State state, const Coordinator& ranks, MoveToRank0 move) {
  DDP_ASSIGN_OR_RETURN(const std::unique_ptr<Gathering> gathering,
                       Gathering::Begin(std::move(state), ranks, std::move(move)));
  DDP_RETURN_IF_ERROR(gathering->MakeWhole());
  return gathering->TakeState();
}

namespace {

using nlohmann::json;

constexpr size_t kMostPerBroadcast = 64 << 20;
// The message of a rank 0 that has read what it cannot send, or was not asked to.
constexpr absl::string_view kEachForItself = "each for itself";

// A tensor of the state that rank 0 has read.
struct SentTensor {
  std::string path;  // of the root; of an entry of a rank: empty
  int owner = -1;    // that rank
  at::Tensor values = {};
};

// What rank 0 tells the others: {"root": tree, "per_rank": [tree, …], "tensors": [{…}, …]}.
struct Sent {
  json text;
  std::vector<SentTensor> tensors;
};

bool HasParts(const ReadRequest& request) {
  return std::any_of(request.parts.begin(), request.parts.end(),
                     [](const auto& part) { return !part.second.whole(); });
}

absl::StatusOr<Sent> SentOf(const State& state, const ReadRequest& request) {
  Sent sent;
  std::map<const c10::TensorImpl*, std::string> known;
  json described = json::array();
  const auto add = [&](const std::string& path, const at::Tensor& tensor,
                       int owner) -> absl::StatusOr<std::string> {
    const std::string dtype = tensor.defined() ? DtypeName(tensor.scalar_type()) : "";
    if (dtype.empty() || tensor.layout() != at::kStrided || tensor.is_meta()) {
      return absl::InvalidArgumentError("a tensor without plain bytes");
    }
    // A tensor that is to be cut is one of its own.
    const auto wanted = request.parts.find(path);
    const bool is_cut = owner < 0 && wanted != request.parts.end() && !wanted->second.whole();
    std::string name = absl::StrCat(sent.tensors.size());
    if (owner < 0 && !is_cut) {
      const auto [one, is_new] = known.emplace(tensor.unsafeGetTensorImpl(), name);
      if (!is_new) return one->second;
    }
    described.push_back({{"dtype", dtype},
                         {"shape", tensor.sizes().vec()},
                         {"path", is_cut ? path : ""},
                         {"owner", owner}});
    sent.tensors.push_back({is_cut ? path : "", owner, tensor});
    return name;
  };
  DDP_ASSIGN_OR_RETURN(sent.text["root"],
                       TreeToJson(state.root, [&](const auto& path, const at::Tensor& tensor) {
                         return add(path, tensor, -1);
                       }));
  json entries = json::array();
  for (const auto& [rank, own] : state.per_rank) {
    DDP_ASSIGN_OR_RETURN(
        json tree, TreeToJson(own, [&, of = rank](const auto& path, const at::Tensor& tensor) {
          return add(path, tensor, of);
        }));
    entries.push_back(std::move(tree));
  }
  sent.text["per_rank"] = std::move(entries);
  sent.text["tensors"] = std::move(described);
  return sent;
}

// Removes the entries of dicts that are one of `tensors`.
void Prune(const std::set<std::string>& tensors, json& tree) {
  if (!tree.is_object()) return;
  const auto dict = tree.find("dict");
  if (dict == tree.end()) return;
  json kept = json::array();
  for (json& pair : *dict) {
    const json* name = MemberOf(pair[1], "tensor");
    if (name != nullptr && tensors.contains(name->get<std::string>())) continue;
    Prune(tensors, pair[1]);
    kept.push_back(std::move(pair));
  }
  *dict = std::move(kept);
}

at::Tensor EmptyLike(const json& described) {
  return at::empty(described.at("shape").get<std::vector<int64_t>>(),
                   DtypeOfName(described.at("dtype").get<std::string>()));
}

// Collective: the bytes of rank 0's tensor. `values`: there it is the tensor; elsewhere it is
// made.
absl::StatusOr<at::Tensor> Receive(const json& described, const at::Tensor& values,
                                   const Coordinator& ranks, const BroadcastBytes& broadcast) {
  const at::Tensor tensor = ranks.rank() == 0
                                ? values.detach().resolve_conj().resolve_neg().cpu().contiguous()
                                : EmptyLike(described);
  char* const bytes = static_cast<char*>(tensor.mutable_data_ptr());
  const size_t size = tensor.nbytes();
  for (size_t at = 0; at < size; at += kMostPerBroadcast) {
    DDP_RETURN_IF_ERROR(broadcast(bytes + at, std::min(kMostPerBroadcast, size - at), 0));
  }
  return tensor;
}

// What this rank sees at `path`: a file's size, or "".
std::string SizeOfFile(const std::string& path) {
  const absl::StatusOr<FileReader> file = FileReader::Open(path);
  return file.ok() ? absl::StrCat(file->size()) : "";
}

// On rank 0: describes where all ranks find the bytes of those tensors that are a whole storage
// each, and reads the others' storages.
absl::Status DescribeUnread(const std::string& path, bool all_see, StoredBytesOf unread,
                            Sent& sent) {
  const auto is_whole = [](const at::Tensor& tensor) {
    return tensor.is_contiguous() && tensor.storage_offset() == 0 && !tensor.is_conj() &&
           !tensor.is_neg() && tensor.nbytes() == tensor.storage().nbytes();
  };
  const auto read = [&](StoredBytesOf::iterator found,
                        const c10::Storage& storage) -> absl::Status {
    const StoredBytes stored = found->second;
    unread.erase(found);
    DDP_ASSIGN_OR_RETURN(const FileReader file, FileReader::Open(path));
    DDP_RETURN_IF_ERROR(file.ReadAt(stored.offset, storage.mutable_data(), storage.nbytes()));
    if (Crc32(storage.data(), storage.nbytes()) == stored.crc) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat(path, " ", stored.damaged));
  };
  // What is more than one tensor is sent as these are.
  std::map<const c10::StorageImpl*, int> uses;
  for (const SentTensor& tensor : sent.tensors) {
    ++uses[tensor.values.storage().unsafeGetStorageImpl()];
  }
  for (size_t i = 0; i < sent.tensors.size(); ++i) {
    const at::Tensor& values = sent.tensors[i].values;
    const auto found = unread.find(values.storage().unsafeGetStorageImpl());
    if (found == unread.end()) continue;
    if (!all_see || !is_whole(values) || uses[found->first] > 1) {
      DDP_RETURN_IF_ERROR(read(found, values.storage()));
      continue;
    }
    json& described = sent.text.at("tensors")[i];
    described["offset"] = found->second.offset;
    described["crc"] = found->second.crc;
    described["damaged"] = found->second.damaged;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::optional<State>> ReadByRank0(Format& format, const std::string& path,
                                                 const ReadRequest& request,
                                                 const Coordinator& ranks,
                                                 const BroadcastBytes& broadcast) {
  const bool has_parts = HasParts(request);
  const bool can_be_sent = request.left_out == nullptr && (!has_parts || request.all_else);
  // "SIZE REQUEST"
  DDP_ASSIGN_OR_RETURN(
      const std::vector<std::string> told_by_ranks,
      ranks.AllGather(can_be_sent ? absl::StrCat(SizeOfFile(path), " ", InCommon(request)) : ""));
  std::vector<std::pair<std::string, std::string>> by_rank;
  for (const std::string& one : told_by_ranks) {
    std::pair<std::string, std::string> words = absl::StrSplit(one, absl::MaxSplits(' ', 1));
    by_rank.push_back(std::move(words));
  }
  bool all_see = !by_rank[0].first.empty();
  for (const auto& [size, wanted] : by_rank) {
    if (wanted.empty() || wanted != by_rank[0].second) return std::nullopt;
    all_see = all_see && size == by_rank[0].first;
  }

  Sent sent;
  std::string text;
  const auto read = [&]() -> absl::StatusOr<std::string> {
    if (ranks.rank() != 0) return "";
    ReadRequest whole = request;
    if (request.all_else) whole.parts.clear();
    if (whole.per_rank == PerRank::kOwn) whole.per_rank = PerRank::kAll;
    StoredBytesOf unread;
    whole.unread = &unread;
    DDP_ASSIGN_OR_RETURN(const State state, format.Read(path, whole));
    absl::StatusOr<Sent> made = SentOf(state, request);
    if (!made.ok()) return std::string(kEachForItself);
    sent = *std::move(made);
    DDP_RETURN_IF_ERROR(DescribeUnread(path, all_see, std::move(unread), sent));
    text = sent.text.dump();
    return absl::StrCat(text.size());
  };
  DDP_ASSIGN_OR_RETURN(const std::string size,
                       ranks.Broadcast(CatchStatus(absl::StrCat("reading ", path), read)));
  if (size == kEachForItself) return std::nullopt;
  uint64_t bytes = 0;
  if (!absl::SimpleAtoi(size, &bytes)) return absl::InternalError("rank 0 gives no size");
  text.resize(bytes);
  DDP_RETURN_IF_ERROR(broadcast(text.data(), bytes, /*from=*/0));
  DDP_ASSIGN_OR_RETURN(json told, ParseJson(text, {.depth = 512}));

  State state;
  const size_t saved = told.at("per_rank").size();
  const bool own = request.per_rank == PerRank::kOwn && saved == static_cast<size_t>(ranks.size());
  std::vector<at::Tensor> tensors(told.at("tensors").size());
  std::set<std::string> cut;
  SharedReader reader(path, ranks, broadcast);
  std::vector<at::Tensor> read_together(tensors.size());
  const auto is_unread = [&](size_t i) { return told.at("tensors")[i].contains("offset"); };
  // From `i` on, as many as make up a round: a rank needs memory for these and its parts.
  const auto read_round = [&](size_t i) {
    std::vector<std::pair<const json*, at::Tensor>> round;
    for (size_t bytes = 0; i < tensors.size() && bytes < reader.round_bytes(); ++i) {
      if (!is_unread(i)) continue;
      const json& described = told.at("tensors")[i];
      read_together[i] = ranks.rank() == 0 ? std::exchange(sent.tensors[i].values, {}).detach()
                                           : EmptyLike(described);
      bytes += read_together[i].nbytes();
      round.emplace_back(&described, read_together[i]);
    }
    return reader.Read(round);
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    const json& described = told.at("tensors")[i];
    at::Tensor whole;
    if (is_unread(i)) {
      if (!read_together[i].defined()) DDP_RETURN_IF_ERROR(read_round(i));
      whole = std::exchange(read_together[i], {});
    } else {
      const at::Tensor mine =
          ranks.rank() == 0 ? std::exchange(sent.tensors[i].values, {}) : at::Tensor();
      DDP_ASSIGN_OR_RETURN(whole, Receive(described, mine, ranks, broadcast));
    }
    const auto owner = described.at("owner").get<int>();
    if (own && owner >= 0 && owner != ranks.rank()) continue;
    const auto part = request.parts.find(described.at("path").get<std::string>());
    std::optional<ShardedTensor> parts;
    if (part != request.parts.end()) parts = Cut(whole, part->second);
    if (parts.has_value()) {
      state.sharded.emplace(part->first, *std::move(parts));
      cut.insert(absl::StrCat(i));
    } else {
      tensors[i] = whole;
    }
  }
  DDP_RETURN_IF_ERROR(reader.End());
  Prune(cut, told.at("root"));
  const TensorOfName tensor_of = [&](const std::string& name) -> absl::StatusOr<c10::IValue> {
    return c10::IValue(tensors.at(std::stoul(name)));
  };
  DDP_ASSIGN_OR_RETURN(const c10::IValue root, TreeFromJson(told.at("root"), tensor_of));
  state.root = root.toGenericDict();
  for (size_t rank = 0; rank < saved; ++rank) {
    if (own && static_cast<int>(rank) != ranks.rank()) continue;
    DDP_ASSIGN_OR_RETURN(const c10::IValue entries,
                         TreeFromJson(told.at("per_rank")[rank], tensor_of));
    state.per_rank.emplace(static_cast<int>(rank), entries.toGenericDict());
  }
  return std::optional<State>(std::move(state));
}

ReadRequest WithPerRankEntries(ReadRequest request) {
  if (request.parts.empty() || request.per_rank == PerRank::kNone) return request;
  Wanted entries = Whole{};
  entries.optional = true;
  request.parts.emplace(kPerRankEntries, std::move(entries));
  return request;
}

void TakePerRank(State& state, PerRank which, const Coordinator* ranks) {
  const auto found = state.root.find(kPerRankEntries);
  if (found == state.root.end() || !found->value().isGenericDict()) return;
  const c10::impl::GenericDict by_key = found->value().toGenericDict();
  std::map<int, c10::impl::GenericDict> per_rank;
  for (const auto& entry : by_key) {
    if (!entry.value().isList()) return;
    const std::vector<c10::IValue> values = entry.value().toListRef().vec();
    for (size_t i = 0; i < values.size(); ++i) {
      per_rank.emplace(static_cast<int>(i), NewTree()).first->second.insert(entry.key(), values[i]);
    }
  }
  (void)state.root.erase(kPerRankEntries);
  if (which == PerRank::kNone) return;
  state.per_rank = std::move(per_rank);
  const int size = ranks == nullptr ? 1 : ranks->size();
  const int rank = ranks == nullptr ? 0 : ranks->rank();
  if (which == PerRank::kAll || static_cast<int>(state.per_rank.size()) != size) return;
  std::erase_if(state.per_rank, [&](const auto& entry) { return entry.first != rank; });
}

}  // namespace ddp::checkpoint
