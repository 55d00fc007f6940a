#include "ddp/join.h"

#include <bit>
#include <stdexcept>
#include <string>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "c10/core/GradMode.h"
#include "ddp/collective_status.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace ddp {
namespace {

constexpr int64_t kRunOut = -1;

// Leaves the body of a rank that still has inputs.
struct EarlyTermination : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace

struct JoinContext::Message {
  int64_t joinable = kRunOut;     // its place in the list
  int64_t kind = 0;               // of a rank that has run out: whether it has shadowed anything
  int64_t arguments[2] = {0, 0};  // bits of doubles

  bool operator==(const Message&) const = default;
};

Joinable::Announced::Announced(JoinContext* context) : context_(context) {
  if (context_ != nullptr) ++context_->depth_;
}

Joinable::Announced::~Announced() {
  if (context_ != nullptr) --context_->depth_;
}

Joinable::Announced Joinable::Announce(const JoinOperation& operation) {
  if (join_context_ != nullptr && join_context_->depth_ == 0) {
    join_context_->Announce(join_number_, operation);
  }
  return Announced(join_context_);
}

JoinContext::JoinContext(const std::vector<Joinable*>& joinables, const JoinOptions& options)
    : joinables_(joinables),
      options_(options),
      group_(joinables[0]->join_group()),
      device_(joinables[0]->join_device()) {
  for (size_t i = 0; i < joinables_.size(); ++i) {
    joinables_[i]->join_context_ = this;
    joinables_[i]->join_number_ = static_cast<int64_t>(i);
  }
}

JoinContext::~JoinContext() {
  for (Joinable* joinable : joinables_) {
    joinable->join_context_ = nullptr;
    joinable->SetGradientFactor(1);
  }
}

bool JoinContext::AnyReducesInBackward() const {
  for (const Joinable* joinable : joinables_) {
    if (joinable->ReducesInBackward()) return true;
  }
  return false;
}

void JoinContext::ShadowBackward() const {
  for (Joinable* joinable : joinables_) {
    if (joinable->ReducesInBackward()) joinable->ShadowBackward();
  }
}

std::vector<JoinContext::Message> JoinContext::Exchange(const Message& mine) {
  constexpr int64_t kNumbers = sizeof(Message) / sizeof(int64_t);
  const c10::NoGradGuard no_grad;
  at::Tensor sent = at::empty({kNumbers}, at::kLong);
  *reinterpret_cast<Message*>(sent.mutable_data_ptr()) = mine;
  sent = sent.to(device_);
  at::Tensor all = at::empty({group_->getSize() * kNumbers}, sent.options());
  group_->all_gather_single(all, sent)->wait();
  all = all.cpu();
  const auto* first = static_cast<const Message*>(all.const_data_ptr());
  return {first, first + group_->getSize()};
}

// Errors here are found by all ranks alike.
void JoinContext::TakeIn(const std::vector<Message>& messages) {
  std::vector<int> live, run_out;
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    (messages[rank].joinable == kRunOut ? run_out : live).push_back(static_cast<int>(rank));
  }
  if (live.empty()) return;
  if (options_.throw_on_early_termination && !run_out.empty()) {
    throw EarlyTermination(absl::StrCat(
        "Join: no more inputs on rank ", absl::StrJoin(run_out, ", "),
        ", and throw_on_early_termination is set: all ranks stop before the next operation"));
  }
  first_live_ = live[0];
  for (const int rank : live) {
    TORCH_CHECK(messages[rank] == messages[first_live_], "Join: rank ", first_live_,
                " is about to make operation ", messages[first_live_].kind, " of joinable ",
                messages[first_live_].joinable, ", and rank ", rank, " operation ",
                messages[rank].kind, " of joinable ", messages[rank].joinable,
                ": ranks must make the same calls with the same arguments for each batch");
  }
  const double factor =
      options_.divide_by_initial_world_size
          ? 1.0
          : static_cast<double>(messages.size()) / static_cast<double>(live.size());
  for (Joinable* joinable : joinables_) joinable->SetGradientFactor(factor);
}

void JoinContext::Announce(int64_t joinable, const JoinOperation& operation) {
  TakeIn(Exchange({.joinable = joinable,
                   .kind = operation.kind,
                   .arguments = {std::bit_cast<int64_t>(operation.arguments[0]),
                                 std::bit_cast<int64_t>(operation.arguments[1])}}));
}

int JoinContext::ShadowOthers() {
  bool has_shadowed = false;
  while (true) {
    const std::vector<Message> messages = Exchange({.kind = has_shadowed});
    TakeIn(messages);
    int last = -1;
    const Message* operation = nullptr;
    for (size_t rank = 0; rank < messages.size() && operation == nullptr; ++rank) {
      if (messages[rank].joinable != kRunOut) operation = &messages[rank];
      if (last < 0 && messages[rank].kind == 0) last = static_cast<int>(rank);
    }
    if (operation == nullptr) return last;
    has_shadowed = true;
    const Joinable::Announced quiet(this);
    joinables_[operation->joinable]->Shadow(
        {.kind = operation->kind,
         .arguments = {std::bit_cast<double>(operation->arguments[0]),
                       std::bit_cast<double>(operation->arguments[1])}});
  }
}

absl::Status Join(const std::vector<Joinable*>& joinables, const JoinOptions& options,
                  const std::function<absl::Status()>& body) {
  if (joinables.empty()) return absl::InvalidArgumentError("Join: there is nothing to join");
  for (const Joinable* joinable : joinables) {
    if (joinable->joined()) {
      return absl::FailedPreconditionError("Join: one of the objects is being joined already");
    }
    DDP_RETURN_IF_ERROR(joinable->CheckJoin(options));
    if (joinable->join_group() != joinables[0]->join_group()) {
      return absl::InvalidArgumentError("Join: the objects belong to different process groups");
    }
  }
  const c10::intrusive_ptr<c10d::ProcessGroup> group = joinables[0]->join_group();
  if (!group || group->getSize() == 1) return body();
  return CatchCollective("", [&]() -> absl::Status {
    try {
      JoinContext context(joinables, options);
      DDP_RETURN_IF_ERROR(body());
      const int source = context.ShadowOthers();
      const Joinable::Announced quiet(&context);
      for (Joinable* joinable : joinables) joinable->FinishPending();
      for (Joinable* joinable : joinables) joinable->FinishJoin(source);
      return absl::OkStatus();
    } catch (const EarlyTermination& error) {
      return absl::FailedPreconditionError(error.what());
    }
  });
}

}  // namespace ddp
