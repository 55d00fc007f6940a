#include "ddp/join.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <stdexcept>
#include <string>
#include <typeinfo>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "c10/core/GradMode.h"
#include "c10/util/Type.h"
#include "ddp/collective_status.h"
#include "third_party/libtorch/compat.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace ddp {
namespace {

constexpr int64_t kRunOut = -1;

// Of this thread: the innermost one whose body runs or whose others it shadows.
thread_local const JoinContext* current_join = nullptr;

// Leaves the body of a rank that still has inputs.
struct EarlyTermination : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace

struct JoinContext::Message {
  int64_t joinable = kRunOut;     // its place in the list
  int64_t kind = 0;               // of a rank that has run out: whether it has shadowed anything
  int64_t arguments[2] = {0, 0};  // bits of doubles

  bool IsSameCall(const Message& other) const {
    return joinable == other.joinable && kind == other.kind && arguments[0] == other.arguments[0] &&
           arguments[1] == other.arguments[1];
  }
};

Joinable::Announced::Announced(JoinContext* context, bool is_exchanged)
    : context_(context), is_exchanged_(is_exchanged) {
  if (context_ != nullptr) ++context_->depth_;
}

Joinable::Announced::~Announced() {
  if (context_ != nullptr) --context_->depth_;
}

bool Joinable::Announced::is_shadowed() const {
  return is_exchanged_ && context_->any_has_run_out();
}

Joinable::Announced Joinable::Announce(const JoinOperation& operation) {
  if (join_context_ == nullptr) {
    CheckListed();
    return Announced(nullptr);
  }
  const bool exchanges = join_context_->depth_ == 0;
  if (exchanges) join_context_->Announce(join_number_, operation);
  return Announced(join_context_, exchanges);
}

void Joinable::CheckListed() const {
  if (join_context_ != nullptr) return;
  for (const JoinContext* join = current_join; join != nullptr; join = join->outer_) {
    TORCH_CHECK(join->depth_ > 0 || join->group_ != join_group(), "Join: a ",
                c10::demangle(typeid(*this).name()),
                " communicates within the Join over its group, but is not in its list, so that "
                "ranks without inputs cannot shadow it: add it to the list");
  }
}

JoinContext::JoinContext(const std::vector<Joinable*>& joinables, const JoinOptions& options)
    : joinables_(joinables),
      options_(options),
      group_(joinables[0]->join_group()),
      device_(joinables[0]->join_device()),
      outer_(current_join) {
  current_join = this;
  for (size_t i = 0; i < joinables_.size(); ++i) {
    joinables_[i]->join_context_ = this;
    joinables_[i]->join_number_ = static_cast<int64_t>(i);
  }
}

JoinContext::~JoinContext() {
  current_join = outer_;
  for (Joinable* joinable : joinables_) {
    joinable->join_context_ = nullptr;
    joinable->SetGradientFactor(1);
  }
}

bool JoinContext::IsJoined(const c10d::ProcessGroup& group) {
  for (const JoinContext* join = current_join; join != nullptr; join = join->outer_) {
    if (join->group_.get() == &group) return true;
  }
  return false;
}

bool JoinContext::IsInBody() { return current_join != nullptr && current_join->depth_ == 0; }

bool JoinContext::TakesSteps() const {
  return std::any_of(joinables_.begin(), joinables_.end(),
                     [](const Joinable* joinable) { return joinable->TakesSteps(); });
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
  any_has_run_out_ = !run_out.empty();
  for (const int rank : live) {
    TORCH_CHECK(messages[rank].IsSameCall(messages[first_live_]), "Join: rank ", first_live_,
                " is about to make operation ", messages[first_live_].kind, " of joinable ",
                messages[first_live_].joinable, ", and rank ", rank, " operation ",
                messages[rank].kind, " of joinable ", messages[rank].joinable,
                ": ranks must make the same calls with the same arguments for each batch, and an "
                "optimizer's steps with the same options, as of schedules");
  }
  const double factor =
      options_.divide_by_initial_world_size
          ? 1.0
          : static_cast<double>(messages.size()) / static_cast<double>(live.size());
  for (Joinable* joinable : joinables_) joinable->SetGradientFactor(factor);
}

void JoinContext::Announce(int64_t joinable, const JoinOperation& operation) {
  for (const Joinable* other : joinables_) {
    TORCH_CHECK(!other->IsReducing(), "Join: the backward of joinable ", other->join_number_,
                " is not reduced completely, but joinable ", joinable,
                " is about to communicate. Either parameters got no gradient (set "
                "find_unused_parameters), or this backward runs through both: make the loss of one "
                "joined model at a time, or leave the reduction of both to one wrapper");
  }
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
    for (size_t rank = 0; rank < messages.size(); ++rank) {
      if (messages[rank].joinable == kRunOut) {
        if (last < 0 && messages[rank].kind == 0) last = static_cast<int>(rank);
        continue;
      }
      if (operation == nullptr) operation = &messages[rank];
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

absl::Status Join(const std::vector<Joinable*>& listed, const JoinOptions& options,
                  const std::function<absl::Status()>& body) {
  std::vector<Joinable*> joinables;
  std::copy_if(listed.begin(), listed.end(), std::back_inserter(joinables),
               [](const Joinable* joinable) { return joinable->TakesPart(); });
  if (joinables.empty()) return absl::InvalidArgumentError("Join: there is nothing to join");
  for (const Joinable* joinable : joinables) {
    if (joinable->joined()) {
      return absl::FailedPreconditionError("Join: one of the objects is being joined already");
    }
    DDP_RETURN_IF_ERROR(joinable->CheckJoin(options));
    if (joinable->join_group() != joinables[0]->join_group()) {
      return absl::InvalidArgumentError(
          "Join: the objects belong to different process groups; one that was made without a "
          "group, as a GradScaler may be, needs that of the others");
    }
  }
  const c10::intrusive_ptr<c10d::ProcessGroup> group = joinables[0]->join_group();
  if (!group || group->getSize() == 1) return body();
  if (JoinContext::IsJoined(*group)) {
    return absl::FailedPreconditionError(
        "Join: this is in the body of a Join over the same group; list all objects in one Join");
  }
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
