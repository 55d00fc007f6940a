#include "tools/bench/peer_collectives.h"

#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status.h"

namespace ddp::tools::bench {
namespace {

constexpr absl::string_view kSeparate = "separate";

}  // namespace

PeerCollectives::Memory PeerCollectives::Allocate(int64_t bytes) {
  constexpr int64_t kPage = 4096;
  return Memory(aligned_alloc(kPage, static_cast<size_t>((bytes + kPage - 1) / kPage * kPage)));
}

absl::StatusOr<Buffers> PeerCollectives::Prepare(const CollectiveTask& task) {
  if (task.variant != kInPlace && task.variant != kSeparate) {
    return absl::InvalidArgumentError(absl::StrCat("there is no variant '", task.variant, "'"));
  }
  DDP_RETURN_IF_ERROR(SetType(task.dtype));
  op_ = task.op;
  input_count_ = InputElements(task, place_.world_size);
  output_count_ = OutputElements(task, place_.world_size);
  in_place_ = op_ == CollectiveOp::kBroadcast || (task.variant == kInPlace && MayBeInPlace(op_));
  if (bytes_ != task.bytes) Free();
  bytes_ = task.bytes;
  if (first_ == nullptr) first_ = Allocate(bytes_);
  if (!in_place_ && second_ == nullptr) second_ = Allocate(bytes_);
  if (first_ == nullptr || (!in_place_ && second_ == nullptr)) {
    return absl::ResourceExhaustedError(absl::StrCat("no memory for ", bytes_, " bytes"));
  }
  input_ = first_.get();
  output_ = in_place_ ? first_.get() : second_.get();
  if (in_place_ && op_ == CollectiveOp::kAllGather) {
    input_ = static_cast<char*>(input_) + place_.rank * input_count_ * ElementSize(task.dtype);
  }
  return Buffers{input_, output_};
}

void PeerCollectives::Free() {
  first_.reset();
  second_.reset();
}

int ServePeer(int argc, char** argv, absl::string_view dtypes, const Place& place,
              Collectives& collectives) {
  absl::string_view control = argc == 2 ? argv[1] : "";
  if (!absl::ConsumePrefix(&control, "--control=")) {
    fprintf(stderr, "error: started by //tools/bench:collectives, with --control=SOCKET\n");
    return 2;
  }
  const absl::Status status = ServeTasks(
      control, place,
      absl::StrCat("through=raw arena=0 dtype=", dtypes, " variant=", kInPlace, ",", kSeparate),
      collectives);
  if (status.ok()) return 0;
  fprintf(stderr, "error: %s\n", std::string(status.message()).c_str());
  return 1;
}

}  // namespace ddp::tools::bench
