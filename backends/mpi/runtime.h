// The process's MPI: started once, spoken to by one thread, ended at exit.
//
//   DDP_ASSIGN_OR_RETURN(Runtime* runtime, Runtime::Start(absl::Seconds(60)));
//   DDP_ASSIGN_OR_RETURN(std::shared_ptr<MpiGroup> group, MpiGroup::Create(*runtime, {0, 1, 2}));
//
// Every call of MPI, MPI_Init_thread and MPI_Finalize included, is made by the progress thread. To
// MPI that is the main thread of a program that asks for no more than MPI_THREAD_FUNNELED, which
// every MPI has and for which none takes locks. A program that has initialised MPI itself must have
// asked for MPI_THREAD_MULTIPLE, because its calls and ours may then coincide.
//
// A process that exits with status 0 finalises MPI, and waits for the other ranks to do so, for as
// long as a collective may take. One that exits with another status leaves at once and without:
// mpirun then ends the job, whose other ranks would wait for it in vain.
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

// FailedPrecondition, with how to start it, for a process that no mpirun (or srun with PMI) has
// started, so that MPI would know of it alone.
absl::Status StartedByMpirun();

// "Open MPI v4.1.4": what this program is linked with.
std::string LibraryVersion();

// Thread safe.
class Runtime {
 public:
  // Collective over the job on the first call, which waits at most `timeout` for MPI_Init_thread:
  // DeadlineExceeded if other ranks do not get there. FailedPrecondition where StartedByMpirun is,
  // or if the program's own MPI allows too few threads.
  static absl::StatusOr<Runtime*> Start(absl::Duration timeout);

  // This process in MPI_COMM_WORLD.
  int world_rank() const { return world_rank_; }
  int world_size() const { return world_size_; }
  // Largest tag of a message.
  int max_tag() const { return max_tag_; }

  // Has the progress thread run `call`, and waits for it. Not to be called on the progress thread.
  absl::Status Call(const std::function<absl::Status()>& call);
  // Has the progress thread run `call` some time.
  void Post(std::function<void()> call);

  // MPI_Finalize waits as long as the longest collective may take: at least `timeout`.
  void WaitAtExit(absl::Duration timeout);

 private:
  friend class MpiGroup;

  // An operation that has started.
  struct Running {
    Operation operation;
    std::shared_ptr<MpiGroup> group;
    Channel channel;
    Task task;
    absl::Time deadline;
    bool reported = false;  // its caller has been told; only MPI is not done with it
  };

  Runtime() = default;

  // On the progress thread.
  void Main();
  absl::Status Initialize();
  void TakeCommands(absl::Duration patience);
  // Takes everything one step further; whether anything got anywhere.
  bool Poll();
  void Launch(std::shared_ptr<MpiGroup> group, Operation operation);
  void Expire(Running& running);
  // Its caller has been told, or is about to be; what is left is to wait until MPI is done with it.
  static void Abandon(Running& running);
  bool OnlyAbandoned() const;
  bool MayEnd();

  enum class Ending { kNot, kFinalize, kLeave };
  static void AtExit(int exit_status, void* runtime);
  // Waits until the progress thread has ended, so that nothing of ours runs while static objects
  // are destroyed.
  void End(Ending how);

  int world_rank_ = 0;
  int world_size_ = 1;
  int max_tag_ = 32767;  // the least that MPI allows
  bool owns_mpi_ = true;
  std::thread::id progress_thread_;

  // Progress thread only.
  std::list<std::unique_ptr<Running>> running_;
  std::vector<Awaited> awaited_;                // in Poll: by what has been polled and goes on
  absl::Time given_up_ = absl::InfinitePast();  // when only abandoned operations were left at exit

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
