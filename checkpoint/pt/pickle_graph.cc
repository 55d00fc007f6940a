#include "checkpoint/pt/pickle_graph.h"

#include <cstring>
#include <unordered_map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "checkpoint/pt/pickle_ops.h"

namespace ddp::checkpoint::pt {
namespace {

// The globals that a pickle of plain data and tensors names; all others are refused.
constexpr absl::string_view kOrderedDict = "collections.OrderedDict";
constexpr absl::string_view kCounter = "collections.Counter";
constexpr absl::string_view kSize = "torch.Size";
constexpr absl::string_view kDevice = "torch.device";
constexpr absl::string_view kTensorV2 = "torch._utils._rebuild_tensor_v2";
constexpr absl::string_view kTensorV3 = "torch._utils._rebuild_tensor_v3";
constexpr absl::string_view kParameter = "torch._utils._rebuild_parameter";

bool IsAllowed(absl::string_view global) {
  for (absl::string_view known : {kOrderedDict, kCounter, kSize, kDevice, kTensorV2, kTensorV3,
                                  kParameter, kUntypedStorage}) {
    if (global == known) return true;
  }
  return DtypeOfStorage(global) != nullptr || DtypeOfName(global) != nullptr;
}

class Parser {
 public:
  explicit Parser(absl::string_view pickle) : bytes_(pickle) {}

  absl::StatusOr<PickleGraph> Run() {
    for (;;) {
      start_ = at_;
      if (at_ >= bytes_.size()) return Damaged("ends without the stop opcode");
      const Opcode op = static_cast<Opcode>(bytes_[at_++]);
      if (op == Opcode::kStop) {
        if (at_ != bytes_.size()) return Damaged("goes on after the stop opcode");
        if (stack_.size() != 1 || !marks_.empty()) return Damaged("stops in the middle of a value");
        return PickleGraph{std::move(nodes_), stack_[0]};
      }
      DDP_RETURN_IF_ERROR(Step(op));
    }
  }

 private:
  absl::Status Damaged(absl::string_view what) const {
    return absl::DataLossError(absl::StrCat("pickle, byte ", start_, ": ", what));
  }

  absl::Status Step(Opcode op) {
    switch (op) {
      case Opcode::kProtocol: {
        DDP_ASSIGN_OR_RETURN(const uint64_t version, Unsigned(1));
        if (version != 2) {
          return Damaged(absl::StrCat("protocol ", version,
                                      "; save it with torch.save's default pickle_protocol, 2"));
        }
        return absl::OkStatus();
      }
      case Opcode::kMark:
        marks_.push_back(stack_.size());
        return absl::OkStatus();
      case Opcode::kNone:
        return Push({.kind = Kind::kNone});
      case Opcode::kNewTrue:
      case Opcode::kNewFalse:
        return Push({.kind = Kind::kBool, .integer = op == Opcode::kNewTrue});
      case Opcode::kBinInt:
      case Opcode::kBinInt1:
      case Opcode::kBinInt2: {
        DDP_ASSIGN_OR_RETURN(const uint64_t value, Unsigned(op == Opcode::kBinInt    ? 4
                                                            : op == Opcode::kBinInt2 ? 2
                                                                                     : 1));
        const int64_t integer = op == Opcode::kBinInt ? static_cast<int32_t>(value) : value;
        return Push({.kind = Kind::kInt, .integer = integer});
      }
      case Opcode::kLong1:
        return Long();
      case Opcode::kBinFloat: {
        DDP_ASSIGN_OR_RETURN(const absl::string_view digits, Take(8));
        uint64_t bits = 0;
        for (char c : digits) bits = bits << 8 | static_cast<uint8_t>(c);
        double real;
        std::memcpy(&real, &bits, sizeof(real));
        return Push({.kind = Kind::kFloat, .real = real});
      }
      case Opcode::kBinUnicode:
      case Opcode::kShortBinString: {
        DDP_ASSIGN_OR_RETURN(const uint64_t size, Unsigned(op == Opcode::kBinUnicode ? 4 : 1));
        DDP_ASSIGN_OR_RETURN(const absl::string_view text, Take(size));
        return Push({.kind = Kind::kString, .text = std::string(text)});
      }
      case Opcode::kEmptyTuple:
        return Push({.kind = Kind::kTuple});
      case Opcode::kTuple: {
        DDP_ASSIGN_OR_RETURN(std::vector<NodeId> items, PopToMark());
        return Push({.kind = Kind::kTuple, .items = std::move(items)});
      }
      case Opcode::kTuple1:
      case Opcode::kTuple2:
      case Opcode::kTuple3: {
        std::vector<NodeId> items(1 + static_cast<int>(op) - static_cast<int>(Opcode::kTuple1));
        for (size_t i = items.size(); i-- > 0;) {
          DDP_ASSIGN_OR_RETURN(items[i], Pop());
        }
        return Push({.kind = Kind::kTuple, .items = std::move(items)});
      }
      case Opcode::kEmptyList:
        return Push({.kind = Kind::kList});
      case Opcode::kEmptyDict:
        return Push({.kind = Kind::kDict});
      case Opcode::kAppend: {
        DDP_ASSIGN_OR_RETURN(const NodeId item, Pop());
        return Extend(Kind::kList, {item});
      }
      case Opcode::kAppends: {
        DDP_ASSIGN_OR_RETURN(std::vector<NodeId> items, PopToMark());
        return Extend(Kind::kList, std::move(items));
      }
      case Opcode::kSetItem: {
        DDP_ASSIGN_OR_RETURN(const NodeId value, Pop());
        DDP_ASSIGN_OR_RETURN(const NodeId key, Pop());
        return Extend(Kind::kDict, {key, value});
      }
      case Opcode::kSetItems: {
        DDP_ASSIGN_OR_RETURN(std::vector<NodeId> items, PopToMark());
        if (items.size() % 2 != 0) return Damaged("a dict key without a value");
        return Extend(Kind::kDict, std::move(items));
      }
      case Opcode::kBinGet:
      case Opcode::kLongBinGet: {
        DDP_ASSIGN_OR_RETURN(const uint64_t key, Unsigned(op == Opcode::kBinGet ? 1 : 4));
        const auto known = memo_.find(key);
        if (known == memo_.end()) return Damaged("refers to a value that was not kept");
        stack_.push_back(known->second);
        return absl::OkStatus();
      }
      case Opcode::kBinPut:
      case Opcode::kLongBinPut: {
        DDP_ASSIGN_OR_RETURN(const uint64_t key, Unsigned(op == Opcode::kBinPut ? 1 : 4));
        DDP_ASSIGN_OR_RETURN(memo_[key], Top());
        return absl::OkStatus();
      }
      case Opcode::kGlobal:
        return Global();
      case Opcode::kReduce:
      case Opcode::kNewObject:
        return Reduce();
      case Opcode::kBuild: {
        // The only attributes that plain containers carry are those of Module.state_dict()
        // (_metadata: module versions), which nothing here depends on.
        DDP_RETURN_IF_ERROR(Pop().status());
        DDP_ASSIGN_OR_RETURN(const NodeId target, Top());
        if (nodes_[target].kind != Kind::kDict) return Damaged("an object with attributes");
        return absl::OkStatus();
      }
      case Opcode::kBinPersId: {
        DDP_ASSIGN_OR_RETURN(const NodeId id, Pop());
        if (nodes_[id].kind != Kind::kTuple || nodes_[id].items.size() != 5) {
          return Damaged("a persistent id that is no storage");
        }
        return Push({.kind = Kind::kStorage, .items = nodes_[id].items});
      }
      case Opcode::kStop:
        break;
    }
    return Damaged(absl::StrCat("opcode 0x", absl::Hex(static_cast<uint8_t>(op)),
                                " is not one that plain data needs"));
  }

  absl::StatusOr<absl::string_view> Take(uint64_t size) {
    if (size > bytes_.size() - at_) return Damaged("is cut off");
    at_ += size;
    return bytes_.substr(at_ - size, size);
  }

  absl::StatusOr<uint64_t> Unsigned(int size) {
    DDP_ASSIGN_OR_RETURN(const absl::string_view digits, Take(size));
    uint64_t value = 0;
    for (int i = 0; i < size; ++i) value |= uint64_t{static_cast<uint8_t>(digits[i])} << (8 * i);
    return value;
  }

  absl::Status Long() {
    DDP_ASSIGN_OR_RETURN(const uint64_t size, Unsigned(1));
    if (size > 8) return Damaged("an integer of more than 64 bits");
    DDP_ASSIGN_OR_RETURN(uint64_t value, Unsigned(static_cast<int>(size)));
    if (size > 0 && size < 8 && (value >> (8 * size - 1) & 1) != 0) {
      value |= ~uint64_t{0} << (8 * size);
    }
    return Push({.kind = Kind::kInt, .integer = static_cast<int64_t>(value)});
  }

  absl::Status Global() {
    const size_t first = bytes_.find('\n', at_);
    const size_t second = first == absl::string_view::npos ? first : bytes_.find('\n', first + 1);
    if (second == absl::string_view::npos) return Damaged("is cut off");
    const std::string name = absl::StrCat(bytes_.substr(at_, first - at_), ".",
                                          bytes_.substr(first + 1, second - first - 1));
    at_ = second + 1;
    if (!IsAllowed(name)) {
      return Damaged(absl::StrCat("refers to the Python global '", absl::CHexEscape(name),
                                  "', and only plain data and tensors are read"));
    }
    return Push({.kind = Kind::kGlobal, .text = name});
  }

  absl::Status Reduce() {
    DDP_ASSIGN_OR_RETURN(const NodeId arguments, Pop());
    DDP_ASSIGN_OR_RETURN(const NodeId function, Pop());
    if (nodes_[function].kind != Kind::kGlobal || nodes_[arguments].kind != Kind::kTuple) {
      return Damaged("calls what is no function");
    }
    // All functions take few arguments. What they are given is shared and not copied, so that no
    // short pickle becomes a large graph.
    constexpr size_t kMaxArguments = 8;
    constexpr size_t kMaxDevice = 64;
    const std::string name = nodes_[function].text;
    if (nodes_[arguments].items.size() > kMaxArguments) {
      return Damaged(absl::StrCat("calls ", name, " with too many arguments"));
    }
    const std::vector<NodeId> args = nodes_[arguments].items;
    const auto is = [&](size_t i, Kind kind) {
      return i < args.size() && nodes_[args[i]].kind == kind;
    };
    if ((name == kOrderedDict || name == kCounter) && args.empty()) {
      return Push({.kind = Kind::kDict});
    }
    if ((name == kCounter && is(0, Kind::kDict)) || (name == kSize && is(0, Kind::kTuple)) ||
        (name == kParameter && is(0, Kind::kTensor))) {
      stack_.push_back(args[0]);
      return absl::OkStatus();
    }
    if (name == kDevice && is(0, Kind::kString) && nodes_[args[0]].text.size() < kMaxDevice) {
      std::string text = nodes_[args[0]].text;
      if (is(1, Kind::kInt)) absl::StrAppend(&text, ":", nodes_[args[1]].integer);
      return Push({.kind = Kind::kString, .text = std::move(text)});
    }
    if ((name == kTensorV2 && args.size() >= 4) || (name == kTensorV3 && args.size() >= 7)) {
      std::vector<NodeId> items(args.begin(), args.begin() + 4);
      if (name == kTensorV3) items.push_back(args[6]);
      return Push({.kind = Kind::kTensor, .items = std::move(items)});
    }
    return Damaged(absl::StrCat("calls ", name, " with arguments of other kinds than expected"));
  }

  absl::Status Push(Node node) {
    nodes_.push_back(std::move(node));
    stack_.push_back(static_cast<NodeId>(nodes_.size() - 1));
    return absl::OkStatus();
  }

  // Values below the last mark cannot be popped before the mark is.
  bool Empty() const { return stack_.size() == (marks_.empty() ? 0 : marks_.back()); }

  absl::StatusOr<NodeId> Top() const {
    if (Empty()) return Damaged("takes a value from an empty stack");
    return stack_.back();
  }

  absl::StatusOr<NodeId> Pop() {
    DDP_ASSIGN_OR_RETURN(const NodeId top, Top());
    stack_.pop_back();
    return top;
  }

  absl::StatusOr<std::vector<NodeId>> PopToMark() {
    if (marks_.empty()) return Damaged("takes values up to a mark that is not there");
    std::vector<NodeId> items(stack_.begin() + static_cast<ptrdiff_t>(marks_.back()), stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }

  absl::Status Extend(Kind kind, std::vector<NodeId> items) {
    DDP_ASSIGN_OR_RETURN(const NodeId target, Top());
    if (nodes_[target].kind != kind) return Damaged("adds elements to what is no such container");
    std::vector<NodeId>& all = nodes_[target].items;
    all.insert(all.end(), items.begin(), items.end());
    return absl::OkStatus();
  }

  absl::string_view bytes_;
  size_t at_ = 0;
  size_t start_ = 0;  // of the current opcode, for messages
  std::vector<Node> nodes_;
  std::vector<NodeId> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint64_t, NodeId> memo_;
};

}  // namespace

absl::StatusOr<PickleGraph> ParsePickle(absl::string_view pickle) {
  if (pickle.size() > kMaxPickle) return absl::DataLossError("pickle: longer than 256 MiB");
  return Parser(pickle).Run();
}

}  // namespace ddp::checkpoint::pt
