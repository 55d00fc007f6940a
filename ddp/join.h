// Training with a different number of batches on each rank, as torch.distributed.algorithms.Join.
//
//   absl::Status status = Join({&model->parallel(), zero.get()}, {}, [&] {
//     for (const Batch& batch : batches) {  // 5 on one rank, 2 on another, none on a third
//       zero->zero_grad();
//       loss(model->forward(batch.input), batch.target).backward();
//       zero->step();
//     }
//     return absl::OkStatus();
//   });
//
// A rank whose body has returned shadows the others: it makes the collectives that they make, with
// gradients of zero, until no rank has inputs left. In the end all ranks have the parameters of a
// rank that had inputs to the end, and its buffers, unless broadcast_buffers is false; but what
// DataParallelOptions::ignored names stays each rank's own. A schedule of learning rates that the
// body steps is stepped on ranks with inputs only: step it after the Join, or on all ranks by a
// Joinable.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "base/options.h"
#include "c10/core/Device.h"
#include "c10/util/intrusive_ptr.h"

namespace c10d {
class ProcessGroup;
}

namespace ddp {

struct JoinOptions {
  // Average gradients over all ranks, so that an example counts the same in every step. False: over
  // the ranks that still have inputs; an error with a user's communication hook, which does not
  // know their number.
  bool divide_by_initial_world_size = true;
  // When a rank runs out, all return an error instead. Required by SyncBatchNorm, whose collectives
  // within a forward cannot be shadowed.
  bool throw_on_early_termination = false;
};

constexpr auto OptionsOf(const JoinOptions&) {
  return Options(Option("divide_by_initial_world_size", &JoinOptions::divide_by_initial_world_size,
                        "with uneven batches, average gradients over all ranks; false: over those "
                        "that still have batches"),
                 Option("throw_on_early_termination", &JoinOptions::throw_on_early_termination,
                        "with uneven batches, stop with an error when a rank runs out"));
}

// An operation that a rank announces to the ranks that shadow it.
struct JoinOperation {
  int64_t kind = 0;  // of the joinable's own
  double arguments[2] = {0, 0};
};

class JoinContext;

// An object whose collectives can be shadowed: DataParallel, ZeroRedundancyOptimizer, or a class of
// your own. Each member function with collectives starts with
//
//   const Announced announced = Announce({.kind = kStep});
//
// which outside of Join costs nothing, and within it is an all-gather of 32 bytes per rank: ranks
// that have run out learn which operation to shadow. Within a Join over the same group, the object
// must be in its list. Thread-compatible.
class Joinable {
 public:
  // While it exists, operations within the announced one are not announced by themselves.
  class [[nodiscard]] Announced {
   public:
    explicit Announced(JoinContext* context, bool is_exchanged = false);  // null: does nothing
    ~Announced();
    Announced(const Announced&) = delete;
    Announced& operator=(const Announced&) = delete;

    // Whether a rank that has run out shadows the operation itself, and not one that it is part of.
    bool is_shadowed() const;

   private:
    JoinContext* const context_;
    const bool is_exchanged_;
  };

  virtual ~Joinable() = default;

  bool joined() const { return join_context_ != nullptr; }

  // The group of its collectives, the same for all that are joined; null in a world of one.
  virtual c10::intrusive_ptr<c10d::ProcessGroup> join_group() const = 0;
  // A device that the group has a backend for.
  virtual c10::Device join_device() const = 0;
  // False: a Join leaves it out of its list, as one that never communicates.
  virtual bool TakesPart() const { return true; }
  // Whether it may take steps of an optimizer on ranks that have run out, too: else these are left
  // behind, which the next Join warns of.
  virtual bool TakesSteps() const { return true; }
  // An error if it cannot be joined.
  virtual absl::Status CheckJoin(const JoinOptions&) const { return absl::OkStatus(); }

  // Makes, on a rank that has run out, the collectives of an operation that another rank's object
  // has announced. May throw, which ends the Join on this rank.
  virtual void Shadow(const JoinOperation& operation) = 0;

  // Whether a backward that it has announced is not reduced completely: nothing else may be
  // announced.
  virtual bool IsReducing() const { return false; }
  // Sets a factor for the gradients, in addition to the division by the world size.
  virtual void SetGradientFactor(double) {}

  // These run on all ranks after the last operation: they finish what is pending, then give all
  // ranks the values of rank `source`.
  virtual void FinishPending() {}
  virtual void FinishJoin(int /*source*/) {}

 protected:
  // Throws c10::Error if ranks announce different operations, if communication fails, or as
  // CheckListed.
  Announced Announce(const JoinOperation& operation);
  // Throws c10::Error if this thread is in the body of a Join over this object's group that the
  // object is not listed in: its collectives would wait for ranks that have run out.
  void CheckListed() const;
  // Null outside of Join.
  JoinContext* join_context() const { return join_context_; }

 private:
  friend class JoinContext;
  JoinContext* join_context_ = nullptr;
  int64_t join_number_ = 0;
};

// The ranks of a Join. Used by joinables.
class JoinContext {
 public:
  JoinContext(const std::vector<Joinable*>& joinables, const JoinOptions& options);
  ~JoinContext();
  JoinContext(const JoinContext&) = delete;
  JoinContext& operator=(const JoinContext&) = delete;

  // The lowest rank that took part in the last operation with inputs of its own.
  int first_live() const { return first_live_; }
  // Whether a rank had run out at the last operation. The same on all ranks.
  bool any_has_run_out() const { return any_has_run_out_; }
  // Whether one of the listed objects is of that kind.
  bool TakesSteps() const;

  // Whether this thread is in a Join over the group.
  static bool IsJoined(const c10d::ProcessGroup& group);
  // Whether it is in the body of one over any group, outside of the listed objects' operations.
  static bool IsInBody();

  // Join calls it: it makes other ranks' operations until none has inputs left. Returns the lowest
  // of the ranks that ran out last.
  int ShadowOthers();

 private:
  friend class Joinable;
  friend class Joinable::Announced;
  struct Message;

  void Announce(int64_t joinable, const JoinOperation& operation);
  std::vector<Message> Exchange(const Message& mine);
  void TakeIn(const std::vector<Message>& messages);

  const std::vector<Joinable*> joinables_;
  const JoinOptions options_;
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const c10::Device device_;
  const JoinContext* const outer_;  // of this thread, over another group
  int depth_ = 0;                   // of operations within operations
  int first_live_ = 0;
  bool any_has_run_out_ = false;
};

// Collective. `body` trains on this rank's inputs; all ranks join the same objects, in one order,
// without those that take no part (GradScaler::Disabled()). A module that DistributedDataParallel
// wraps must be among them. `body` must not make collectives of its own besides those of the joined
// objects. A backward that reaches parameters of two joined objects which both communicate in
// backward is an error: no rank could shadow the order of their messages. Gradients that were
// accumulated under no_sync when a rank runs out are part of the others' next reduction (PyTorch
// drops them); on top of gradients that had been averaged, with divide_by_initial_world_size=false,
// they are an error on all ranks. The body runs on the thread that calls Join.
//
// Returns the body's error, or its exception as a status (CatchCollective in
// ddp/collective_status.h); other ranks then wait for this one as after any failure. The body
// should let exceptions of joined objects pass. InvalidArgument: nothing to join, or different
// groups. FailedPrecondition: one of them, or the group, is being joined already; or a rank has run
// out and throw_on_early_termination, on all ranks, naming those that have. Thread-compatible.
absl::Status Join(const std::vector<Joinable*>& listed, const JoinOptions& options,
                  const std::function<absl::Status()>& body);

}  // namespace ddp
