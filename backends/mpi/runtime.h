// MPI in this process: initialised once, called by one thread, finalised at exit.
//
//   DDP_ASSIGN_OR_RETURN(Runtime* runtime, Runtime::Start(absl::Seconds(60)));
//   DDP_ASSIGN_OR_RETURN(std::shared_ptr<MpiGroup> group, MpiGroup::Create(*runtime, {0, 1, 2}));
//
// All MPI calls, including MPI_Init_thread and MPI_Finalize, are made by the progress thread. For
// MPI this is the main thread of a program with MPI_THREAD_FUNNELED, which every MPI supports,
// without locks. A program that initialises MPI itself must request MPI_THREAD_MULTIPLE, because
// its calls and those of this library may run at the same time.
//
// A process that exits with status 0 finalises MPI, and waits for the other ranks to do so, at most
// as long as a collective may take. A process that exits with another status does not finalise MPI:
// mpirun then ends the job, whose other ranks would wait for this one for ever.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "backends/mpi/operation.h"

namespace ddp::backends::mpi {

class MpiGroup;

// OK if mpirun (or srun with PMI) has started this process; otherwise FailedPrecondition, with how
// to start it.
absl::Status StartedByMpirun();

// The MPI that this program is linked with: "Open MPI v4.1.4".
std::string LibraryVersion();

// Thread-safe.
class Runtime {
 public:
  // The one object of the process, never destroyed. The first call is collective over the job and
  // waits at most `timeout` for MPI_Init_thread: DeadlineExceeded if other ranks do not call it.
  // FailedPrecondition as StartedByMpirun, or if the program has initialised MPI with too low a
  // thread level.
  static absl::StatusOr<Runtime*> Start(absl::Duration timeout);

  // Rank and size are those of MPI_COMM_WORLD.
  int world_rank() const { return world_rank_; }
  int world_size() const { return world_size_; }
  // The largest tag of a message that MPI supports.
  int max_tag() const { return max_tag_; }

  // Runs `call` on the progress thread and waits for it. Must not be called on the progress thread.
  absl::Status Call(const std::function<absl::Status()>& call);
  // Runs `call` on the progress thread later; does not block.
  void Post(std::function<void()> call);

  // Sets the maximum wait for MPI_Finalize at exit; the largest `timeout` of all calls applies.
  void WaitAtExit(absl::Duration timeout);

 private:
  friend class MpiGroup;

  // An operation that has started.
  struct Running {
    Operation operation;
    std::shared_ptr<MpiGroup> group;
    Channel channel;
    Coroutine coroutine;
    absl::Time deadline;
    bool reported = false;  // `done` has been called; MPI still uses the memory
  };

  Runtime() = default;

  // These run on the progress thread only.
  void Main();
  absl::Status Initialize();
  void TakeCommands(absl::Duration patience);
  // Advances all running operations; true if there was progress.
  bool Poll();
  void Launch(std::shared_ptr<MpiGroup> group, Operation operation);
  void Expire(Running& running);
  // Keeps an operation whose `done` has been called, or is about to be, only until MPI no longer
  // uses its memory.
  static void Abandon(Running& running);
  bool OnlyAbandoned() const;
  bool MayEnd();

  enum class Ending { kNot, kFinalize, kLeave };
  static void AtExit(int exit_status, void* runtime);
  // Waits until the progress thread has ended, so that it does not run while static objects are
  // destroyed.
  void End(Ending how);

  int world_rank_ = 0;
  int world_size_ = 1;
  int max_tag_ = 32767;  // the least that MPI allows
  bool owns_mpi_ = true;
  std::thread::id progress_thread_;

  // Progress thread only.
  std::list<std::unique_ptr<Running>> running_;
  // Messages that the operations polled so far wait for; used in Poll.
  std::vector<Awaited> awaited_;
  // At exit, only abandoned operations were left from this time on.
  absl::Time given_up_ = absl::InfinitePast();

  std::mutex mutex_;
  std::condition_variable wake_progress_, wake_callers_;
  std::vector<std::function<void()>> commands_;  // guarded by mutex_
  bool initialized_ = false;                     // guarded by mutex_
  absl::Status init_status_;                     // guarded by mutex_
  bool ended_ = false;                           // guarded by mutex_
  absl::Duration exit_timeout_;                  // guarded by mutex_
  std::atomic<bool> has_commands_{false};
  std::atomic<Ending> ending_{Ending::kNot};  // written under mutex_
};

}  // namespace ddp::backends::mpi
