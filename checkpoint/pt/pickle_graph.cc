#include "checkpoint/pt/pickle_graph.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/utf8.h"
#include "checkpoint/pt/pickle_ops.h"

namespace ddp::checkpoint::pt {
namespace {

// The functions that pickles of plain data and tensors call. Calls of others are kUnsupported.
constexpr absl::string_view kOrderedDict = "collections.OrderedDict";
constexpr absl::string_view kCounter = "collections.Counter";
constexpr absl::string_view kComplexNumber = "builtins.complex";
constexpr absl::string_view kByteArray = "builtins.bytearray";
constexpr absl::string_view kBytesClass = "builtins.bytes";
constexpr absl::string_view kSet = "builtins.set";
constexpr absl::string_view kEncode = "_codecs.encode";
constexpr absl::string_view kSize = "torch.Size";
constexpr absl::string_view kDevice = "torch.device";
constexpr absl::string_view kLayout = "torch.serialization._get_layout";
constexpr absl::string_view kTensorV1 = "torch._utils._rebuild_tensor";
constexpr absl::string_view kTensorV2 = "torch._utils._rebuild_tensor_v2";
constexpr absl::string_view kTensorV3 = "torch._utils._rebuild_tensor_v3";
constexpr absl::string_view kSparseTensor = "torch._utils._rebuild_sparse_tensor";
constexpr absl::string_view kQuantized = "torch._utils._rebuild_qtensor";
constexpr absl::string_view kMetaTensor = "torch._utils._rebuild_meta_tensor_no_storage";
constexpr absl::string_view kNestedTensor = "torch._utils._rebuild_nested_tensor";
constexpr absl::string_view kWrapperSubclass = "torch._utils._rebuild_wrapper_subclass";
constexpr absl::string_view kParameter = "torch._utils._rebuild_parameter";
constexpr absl::string_view kParameterWithState = "torch._utils._rebuild_parameter_with_state";
constexpr absl::string_view kFromType = "torch._tensor._rebuild_from_type_v2";

// Classes of tensors that have attributes, and no other behaviour of their own.
constexpr absl::string_view kPlainTensors[] = {"torch.Tensor", "torch._tensor.Tensor",
                                               "torch.nn.parameter.Parameter",
                                               "torch.nn.parameter.Buffer"};

// Longer names are cut in messages, since many nodes may have one name.
constexpr size_t kShownName = 128;

std::string Shown(absl::string_view name) {
  return absl::StrCat("'", absl::CHexEscape(name.substr(0, kShownName)),
                      name.size() > kShownName ? "…'" : "'");
}

class Parser {
 public:
  Parser(absl::string_view pickle, absl::Span<const absl::string_view> classes)
      : bytes_(pickle), classes_(classes) {}

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
        if (version < 2 || version > 5) {
          return Damaged(absl::StrCat("protocol ", version,
                                      "; save it with torch.save's default pickle_protocol, 2"));
        }
        return absl::OkStatus();
      }
      case Opcode::kFrame: {
        DDP_ASSIGN_OR_RETURN(const uint64_t size, Unsigned(8));
        if (size > bytes_.size() - at_) return Damaged("is cut off");
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
      case Opcode::kLong4:
        return Long(op == Opcode::kLong1 ? 1 : 4);
      case Opcode::kBinFloat: {
        DDP_ASSIGN_OR_RETURN(const absl::string_view digits, Take(8));
        uint64_t bits = 0;
        for (char c : digits) bits = bits << 8 | static_cast<uint8_t>(c);
        double real;
        std::memcpy(&real, &bits, sizeof(real));
        return Push({.kind = Kind::kFloat, .real = real});
      }
      case Opcode::kBinUnicode:
        return Text(4);
      case Opcode::kShortBinString:
      case Opcode::kShortBinUnicode:
        return Text(1);
      case Opcode::kBinUnicode8:
        return Text(8);
      case Opcode::kBinBytes:
        return Bytes(4);
      case Opcode::kShortBinBytes:
        return Bytes(1);
      case Opcode::kBinBytes8:
      case Opcode::kByteArray8:
        return Bytes(8);
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
      case Opcode::kEmptySet:
        return PushUnsupported("is a set");
      case Opcode::kFrozenSet:
        DDP_RETURN_IF_ERROR(PopToMark().status());
        return PushUnsupported("is a frozenset");
      case Opcode::kAppend: {
        DDP_ASSIGN_OR_RETURN(const NodeId item, Pop());
        return Extend(Kind::kList, {item});
      }
      case Opcode::kAppends: {
        DDP_ASSIGN_OR_RETURN(std::vector<NodeId> items, PopToMark());
        return Extend(Kind::kList, std::move(items));
      }
      case Opcode::kAddItems: {
        DDP_RETURN_IF_ERROR(PopToMark().status());
        return Extend(Kind::kUnsupported, {});
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
      case Opcode::kMemoize: {
        const uint64_t key = memo_.size();
        DDP_ASSIGN_OR_RETURN(memo_[key], Top());
        return absl::OkStatus();
      }
      case Opcode::kGlobal:
        return Global();
      case Opcode::kStackGlobal:
        return StackGlobal();
      case Opcode::kReduce:
      case Opcode::kNewObject:
        return Reduce();
      case Opcode::kNewObjectEx: {
        DDP_RETURN_IF_ERROR(Pop().status());
        DDP_RETURN_IF_ERROR(Pop().status());
        DDP_ASSIGN_OR_RETURN(const NodeId type, Pop());
        if (nodes_[type].kind != Kind::kGlobal) return Damaged("makes an object of no class");
        return PushUnsupported(RefersTo(nodes_[type].text));
      }
      case Opcode::kBuild:
        return Build();
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

  // Text and Bytes: `width` bytes of length, then as many bytes.
  absl::Status Text(int width) {
    DDP_ASSIGN_OR_RETURN(const uint64_t size, Unsigned(width));
    DDP_ASSIGN_OR_RETURN(const absl::string_view text, Take(size));
    if (!IsUtf8(text, Surrogates::kAccept)) return Damaged("text that is not UTF-8");
    return Push({.kind = Kind::kString, .text = std::string(text)});
  }

  absl::Status Bytes(int width) {
    DDP_ASSIGN_OR_RETURN(const uint64_t size, Unsigned(width));
    DDP_ASSIGN_OR_RETURN(const absl::string_view bytes, Take(size));
    return Push({.kind = Kind::kBytes, .text = std::string(bytes)});
  }

  absl::Status Long(int width) {
    DDP_ASSIGN_OR_RETURN(const uint64_t size, Unsigned(width));
    DDP_ASSIGN_OR_RETURN(const absl::string_view digits, Take(size));
    if (size > 8) return PushUnsupported("is an integer of more than 64 bits");
    uint64_t value = 0;
    for (size_t i = 0; i < size; ++i) value |= uint64_t{static_cast<uint8_t>(digits[i])} << (8 * i);
    if (size > 0 && size < 8 && (value >> (8 * size - 1) & 1) != 0) {
      value |= ~uint64_t{0} << (8 * size);
    }
    return Push({.kind = Kind::kInt, .integer = static_cast<int64_t>(value)});
  }

  absl::Status Global() {
    const size_t first = bytes_.find('\n', at_);
    const size_t second = first == absl::string_view::npos ? first : bytes_.find('\n', first + 1);
    if (second == absl::string_view::npos) return Damaged("is cut off");
    const absl::string_view module = bytes_.substr(at_, first - at_);
    const absl::string_view name = bytes_.substr(first + 1, second - first - 1);
    at_ = second + 1;
    return PushGlobal(module, name);
  }

  absl::Status StackGlobal() {
    DDP_ASSIGN_OR_RETURN(const NodeId name, Pop());
    DDP_ASSIGN_OR_RETURN(const NodeId module, Pop());
    // What is on the stack may be used many times: names must be short.
    constexpr size_t kMost = 1000;
    for (NodeId id : {module, name}) {
      if (nodes_[id].kind != Kind::kString || nodes_[id].text.size() > kMost) {
        return Damaged("a Python global without a name");
      }
    }
    return PushGlobal(nodes_[module].text, nodes_[name].text);
  }

  // Python 3 writes the names that Python 2 had.
  absl::Status PushGlobal(absl::string_view module, absl::string_view name) {
    if (module == "__builtin__") module = "builtins";
    std::string global = absl::StrCat(module, ".", name);
    if (!classes_.empty() && !IsClass(global) && global != kSize && global != kOrderedDict &&
        DtypeOfName(global) == nullptr) {
      return Damaged(
          absl::StrCat("refers to the Python global ", Shown(global), ", which has no place here"));
    }
    return Push({.kind = Kind::kGlobal, .text = std::move(global)});
  }

  // The attributes of plain containers: those of Module.state_dict() (_metadata: module versions),
  // which nothing here depends on.
  absl::Status Build() {
    DDP_ASSIGN_OR_RETURN(const NodeId state, Pop());
    DDP_ASSIGN_OR_RETURN(const NodeId target, Top());
    if (nodes_[target].kind == Kind::kObject && nodes_[target].items.size() == 2) {
      nodes_[target].items.push_back(state);
      return absl::OkStatus();
    }
    const Kind kind = nodes_[target].kind;
    if (kind != Kind::kDict && kind != Kind::kUnsupported) {
      nodes_[target] = {.kind = Kind::kUnsupported, .text = "is an object with attributes"};
    }
    return absl::OkStatus();
  }

  absl::Status Reduce() {
    DDP_ASSIGN_OR_RETURN(const NodeId arguments, Pop());
    DDP_ASSIGN_OR_RETURN(const NodeId function, Pop());
    if (nodes_[function].kind == Kind::kUnsupported) {
      stack_.push_back(function);
      return absl::OkStatus();
    }
    if (nodes_[function].kind != Kind::kGlobal || nodes_[arguments].kind != Kind::kTuple) {
      return Damaged("calls what is no function");
    }
    if (IsClass(nodes_[function].text)) {
      return Push({.kind = Kind::kObject, .items = {function, arguments}});
    }
    return Call(nodes_[function].text, arguments);
  }

  bool IsClass(absl::string_view name) const {
    return std::find(classes_.begin(), classes_.end(), name) != classes_.end();
  }

  static std::string RefersTo(absl::string_view global) {
    return absl::StrCat("refers to the Python global ", Shown(global),
                        ", and only plain data and tensors are read");
  }

  // Pushes the result of a function. What it is given is shared and not copied, so that no short
  // pickle becomes a large graph.
  absl::Status Call(const std::string function, NodeId arguments) {
    constexpr size_t kMaxArguments = 8;  // of those below
    constexpr size_t kMaxDevice = 64;
    const std::vector<NodeId>& given = nodes_[arguments].items;
    std::vector<NodeId> args(given.begin(),
                             given.begin() + std::min(given.size(), kMaxArguments + 1));
    const auto is = [&](size_t i, Kind kind) {
      return i < args.size() && nodes_[args[i]].kind == kind;
    };
    const auto wrong = [&] {
      return Damaged(
          absl::StrCat("calls ", function, " with arguments of other kinds than expected"));
    };
    const auto pass = [&](size_t i) {
      stack_.push_back(args[i]);
      return absl::OkStatus();
    };

    if (function == kOrderedDict || function == kCounter) {
      if (args.empty()) return Push({.kind = Kind::kDict});
      if (function == kCounter && args.size() == 1 && is(0, Kind::kDict)) return pass(0);
      return wrong();
    }
    if (function == kSize) return args.size() == 1 && is(0, Kind::kTuple) ? pass(0) : wrong();
    if (function == kDevice) {
      if (!is(0, Kind::kString) || nodes_[args[0]].text.size() >= kMaxDevice) return wrong();
      std::string text = nodes_[args[0]].text;
      if (is(1, Kind::kInt)) absl::StrAppend(&text, ":", nodes_[args[1]].integer);
      return Push({.kind = Kind::kString, .text = std::move(text)});
    }
    if (function == kLayout) return args.size() == 1 && is(0, Kind::kString) ? pass(0) : wrong();
    if (function == kComplexNumber) {
      if (args.size() != 2) return wrong();
      for (size_t i : {0, 1}) {
        if (!is(i, Kind::kFloat) && !is(i, Kind::kInt)) return wrong();
      }
      return Push({.kind = Kind::kComplex, .items = std::move(args)});
    }
    if (function == kEncode || function == kByteArray || function == kBytesClass) {
      if (args.empty() && function != kEncode) return Push({.kind = Kind::kBytes});
      if (args.size() == 1 && is(0, Kind::kBytes)) return pass(0);
      if (args.size() == 2 && is(0, Kind::kString) && is(1, Kind::kString)) return Latin1(args);
      return wrong();
    }
    if (function == kSet) return PushUnsupported("is a set");
    if (function == kTensorV1 || function == kTensorV2 || function == kTensorV3) {
      return Tensor(function, args);
    }
    if (function == kParameter || function == kParameterWithState) {
      const bool data = is(0, Kind::kTensor) || is(0, Kind::kSparse) || is(0, Kind::kQuantized) ||
                        is(0, Kind::kUnsupported);
      return data ? pass(0) : wrong();
    }
    if (function == kFromType) {
      // (function, class, its arguments, attributes)
      if (args.size() != 4 || !is(0, Kind::kGlobal) || !is(1, Kind::kGlobal) ||
          !is(2, Kind::kTuple) || nodes_[args[0]].text == kFromType) {
        return wrong();
      }
      for (absl::string_view plain : kPlainTensors) {
        if (nodes_[args[1]].text == plain) return Call(nodes_[args[0]].text, args[2]);
      }
      return PushUnsupported(
          absl::StrCat("is a tensor of the subclass ", Shown(nodes_[args[1]].text)));
    }
    if (function == kWrapperSubclass && is(0, Kind::kGlobal)) {
      return PushUnsupported(
          absl::StrCat("is a tensor of the subclass ", Shown(nodes_[args[0]].text)));
    }
    if (function == kSparseTensor) {
      if (args.size() != 2 || !is(0, Kind::kString) || !is(1, Kind::kTuple)) return wrong();
      const std::vector<NodeId>& data = nodes_[args[1]].items;
      const std::string& layout = nodes_[args[0]].text;
      if (data.size() < 3 || data.size() > 4 || layout.size() > kMaxDevice) return wrong();
      return Push({.kind = Kind::kSparse, .text = layout, .items = data});
    }
    if (function == kQuantized) {
      if (args.size() < 5 || !is(4, Kind::kTuple)) return wrong();
      args.resize(5);
      return Push({.kind = Kind::kQuantized, .items = std::move(args)});
    }
    if (function == kMetaTensor) {
      return PushUnsupported("is a tensor on the device meta, which has no values");
    }
    if (function == kNestedTensor) return PushUnsupported("is a nested tensor");
    return PushUnsupported(RefersTo(function));
  }

  absl::Status Tensor(const std::string& function, const std::vector<NodeId>& args) {
    const bool v3 = function == kTensorV3;
    if (args.size() < (v3 ? 7u : 4u) || args.size() > (v3 ? 8u : 7u)) {
      return Damaged(absl::StrCat("calls ", function, " with too few or too many arguments"));
    }
    Node tensor{.kind = Kind::kTensor, .items = {args.begin(), args.begin() + 4}};
    if (v3) tensor.items.push_back(args[6]);
    const size_t metadata = v3 ? 7 : 6;
    if (args.size() > metadata) {
      const Node& bits = nodes_[args[metadata]];
      constexpr size_t kMostItems = 16;  // many tensors may have one dict
      if ((bits.kind != Kind::kDict && bits.kind != Kind::kNone) ||
          bits.items.size() > kMostItems) {
        return Damaged("a tensor with bad metadata");
      }
      // As torch does: what is there counts, whatever its value.
      for (size_t i = 0; i < bits.items.size(); i += 2) {
        const Node& key = nodes_[bits.items[i]];
        if (key.text == "conj") {
          tensor.integer |= kConj;
        } else if (key.text == "neg") {
          tensor.integer |= kNeg;
        } else {
          return PushUnsupported(
              absl::StrCat("is a tensor with metadata of its device, ", Shown(key.text)));
        }
      }
    }
    return Push(std::move(tensor));
  }

  // bytes in protocol 2: text whose code points are the bytes, and the name of that encoding.
  absl::Status Latin1(const std::vector<NodeId>& args) {
    const absl::string_view encoding = nodes_[args[1]].text;
    if (encoding != "latin1" && encoding != "latin-1") {
      return Damaged("bytes in an encoding other than latin-1");
    }
    const absl::string_view text = nodes_[args[0]].text;
    // Each text is used once, so all bytes together are at most as long as the pickle.
    decoded_ += text.size();
    if (decoded_ > bytes_.size()) return Damaged("makes bytes of the same text again and again");
    std::string bytes;
    for (size_t i = 0; i < text.size(); ++i) {
      const auto lead = static_cast<uint8_t>(text[i]);
      if (lead < 0x80) {
        bytes.push_back(text[i]);
      } else if (lead < 0xc4) {  // U+0080 to U+00FF; the text is UTF-8
        bytes.push_back(static_cast<char>(lead << 6 | (static_cast<uint8_t>(text[++i]) & 0x3f)));
      } else {
        return Damaged("bytes with a code point that is no byte");
      }
    }
    return Push({.kind = Kind::kBytes, .text = std::move(bytes)});
  }

  absl::Status Push(Node node) {
    nodes_.push_back(std::move(node));
    stack_.push_back(static_cast<NodeId>(nodes_.size() - 1));
    return absl::OkStatus();
  }

  absl::Status PushUnsupported(std::string why) {
    return Push({.kind = Kind::kUnsupported, .text = std::move(why)});
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

  // What has no value here may have elements all the same.
  absl::Status Extend(Kind kind, std::vector<NodeId> items) {
    DDP_ASSIGN_OR_RETURN(const NodeId target, Top());
    if (nodes_[target].kind == Kind::kUnsupported) return absl::OkStatus();
    if (nodes_[target].kind != kind) return Damaged("adds elements to what is no such container");
    std::vector<NodeId>& all = nodes_[target].items;
    all.insert(all.end(), items.begin(), items.end());
    return absl::OkStatus();
  }

  absl::string_view bytes_;
  absl::Span<const absl::string_view> classes_;
  size_t at_ = 0;
  size_t start_ = 0;    // of the current opcode, for messages
  size_t decoded_ = 0;  // length of the texts that have become bytes
  std::vector<Node> nodes_;
  std::vector<NodeId> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint64_t, NodeId> memo_;
};

}  // namespace

absl::StatusOr<PickleGraph> ParsePickle(absl::string_view pickle,
                                        absl::Span<const absl::string_view> classes) {
  if (pickle.size() > kMaxPickle) return absl::DataLossError("pickle: longer than 256 MiB");
  return Parser(pickle, classes).Run();
}

}  // namespace ddp::checkpoint::pt
