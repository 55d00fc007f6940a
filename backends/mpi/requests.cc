#include "backends/mpi/requests.h"

#include <algorithm>
#include <climits>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace ddp::backends::mpi {
namespace {

// MPI counts elements in an int. A larger message is one element of a derived type.
class Extent {
 public:
  Extent() = default;
  Extent(const Extent&) = delete;
  Extent& operator=(const Extent&) = delete;
  ~Extent() {
    // MPI keeps the type until pending operations no longer use it.
    if (owned_ != MPI_DATATYPE_NULL) MPI_Type_free(&owned_);
  }

  absl::Status Describe(size_t bytes) {
    if (bytes <= INT_MAX) {
      count = static_cast<int>(bytes);
      return absl::OkStatus();
    }
    constexpr size_t kBlock = size_t{1} << 20;
    MPI_Datatype block = MPI_DATATYPE_NULL;
    DDP_RETURN_IF_ERROR(
        MpiStatus(MPI_Type_contiguous(kBlock, MPI_BYTE, &block), "MPI_Type_contiguous"));
    int lengths[] = {static_cast<int>(bytes / kBlock), static_cast<int>(bytes % kBlock)};
    MPI_Aint offsets[] = {0, static_cast<MPI_Aint>(bytes / kBlock * kBlock)};
    MPI_Datatype types[] = {block, MPI_BYTE};
    absl::Status made = MpiStatus(MPI_Type_create_struct(2, lengths, offsets, types, &owned_),
                                  "MPI_Type_create_struct");
    MPI_Type_free(&block);
    DDP_RETURN_IF_ERROR(made);
    DDP_RETURN_IF_ERROR(MpiStatus(MPI_Type_commit(&owned_), "MPI_Type_commit"));
    count = 1;
    type = owned_;
    return absl::OkStatus();
  }

  int count = 0;
  MPI_Datatype type = MPI_BYTE;

 private:
  MPI_Datatype owned_ = MPI_DATATYPE_NULL;
};

}  // namespace

absl::Status MpiStatus(int code, absl::string_view call) {
  if (code == MPI_SUCCESS) return absl::OkStatus();
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  return absl::InternalError(absl::StrCat(call, ": ", absl::string_view(text, length)));
}

absl::Status Requests::Send(Buffer buffer, int peer, int tag, MPI_Comm comm) {
  Extent extent;
  DDP_RETURN_IF_ERROR(extent.Describe(buffer.bytes));
  return MpiStatus(MPI_Isend(buffer.data, extent.count, extent.type, peer, tag, comm, Add()),
                   "MPI_Isend");
}

void Requests::Receive(Buffer buffer, int peer, int tag, MPI_Comm comm) {
  expected_.push_back({buffer, {peer, tag, comm}});
}

MPI_Request* Requests::Add() { return &requests_.emplace_back(MPI_REQUEST_NULL); }

void Requests::AppendAwaited(std::vector<Awaited>& awaited) const {
  for (const Expected& expected : expected_) awaited.push_back(expected.message);
}

bool Requests::IsForEarlierReceive(size_t i) const {
  const Awaited& mine = expected_[i].message;
  const auto overlaps = [&mine](const Awaited& other) {
    const bool any = mine.peer == MPI_ANY_SOURCE || other.peer == MPI_ANY_SOURCE;
    return mine.comm == other.comm && mine.tag == other.tag && (any || mine.peer == other.peer);
  };
  if (earlier_ != nullptr && std::any_of(earlier_->begin(), earlier_->end(), overlaps)) return true;
  return std::any_of(expected_.begin(), expected_.begin() + i,
                     [&](const Expected& other) { return overlaps(other.message); });
}

absl::StatusOr<bool> Requests::Take(const Expected& expected) {
  int found = 0;
  MPI_Message message = MPI_MESSAGE_NULL;
  MPI_Status status;
  DDP_RETURN_IF_ERROR(MpiStatus(MPI_Improbe(expected.message.peer, expected.message.tag,
                                            expected.message.comm, &found, &message, &status),
                                "MPI_Improbe"));
  if (found == 0) return false;
  source_ = status.MPI_SOURCE;
  MPI_Count bytes = 0;
  MPI_Get_elements_x(&status, MPI_BYTE, &bytes);
  if (static_cast<size_t>(bytes) != expected.buffer.bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", source_, " has sent ", bytes, " bytes where this rank takes ",
                     expected.buffer.bytes, ": the ranks call with tensors of different sizes"));
  }
  Extent extent;
  DDP_RETURN_IF_ERROR(extent.Describe(expected.buffer.bytes));
  DDP_RETURN_IF_ERROR(MpiStatus(
      MPI_Imrecv(expected.buffer.data, extent.count, extent.type, &message, Add()), "MPI_Imrecv"));
  return true;
}

absl::StatusOr<bool> Requests::Test() {
  for (size_t i = 0; i < expected_.size();) {
    bool taken = false;
    if (!IsForEarlierReceive(i)) {
      DDP_ASSIGN_OR_RETURN(taken, Take(expected_[i]));
    }
    if (taken) {
      expected_.erase(expected_.begin() + i);
    } else {
      ++i;
    }
  }
  if (!requests_.empty()) {
    int done = 0;
    DDP_RETURN_IF_ERROR(MpiStatus(MPI_Testall(static_cast<int>(requests_.size()), requests_.data(),
                                              &done, MPI_STATUSES_IGNORE),
                                  "MPI_Testall"));
    if (done == 0) return false;
    requests_.clear();
  }
  return expected_.empty();
}

bool Requests::Idle() {
  int done = 1;
  if (!requests_.empty()) {
    MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, MPI_STATUSES_IGNORE);
  }
  if (done != 0) requests_.clear();
  return done != 0;
}

std::vector<int> Requests::MissingPeers() const {
  std::vector<int> missing;
  for (const Expected& expected : expected_) {
    if (expected.message.peer != MPI_ANY_SOURCE) missing.push_back(expected.message.peer);
  }
  std::sort(missing.begin(), missing.end());
  return missing;
}

}  // namespace ddp::backends::mpi
