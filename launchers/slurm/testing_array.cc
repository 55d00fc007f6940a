// For tests with a real SLURM: submits an array of jobs and reports their states until all have
// ended.
//
//   testing_array STAGE_DIR FOLDER JOBS AT_ONCE PROGRAM [ARGUMENT…]
//
// Job I has the folder FOLDER/I and runs PROGRAM ARGUMENT… I. Each state is a line "ID STATE" on
// standard output, when it changes.
#include <stdio.h>
#include <stdlib.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/file.h"
#include "base/status.h"
#include "launchers/launcher.h"
#include "launchers/queue.h"
#include "launchers/slurm/options.h"

namespace ddp::launchers {
namespace {

absl::Status Run(const std::vector<std::string>& arguments) {
  LaunchOptions options = {.name = "slurm"};
  options.implementations.Mutable<SlurmOptions>("slurm").stage_dir = arguments[0];
  std::vector<BatchJob> jobs;
  for (int i = 0; i < atoi(arguments[2].c_str()); ++i) {
    BatchJob job = {.name = absl::StrCat("job", i),
                    .folder = absl::StrCat(arguments[1], "/", i),
                    .argv = {arguments.begin() + 4, arguments.end()},
                    .launch = options};
    job.argv.push_back(absl::StrCat(i));
    DDP_RETURN_IF_ERROR(MakeDirectories(job.folder));
    jobs.push_back(std::move(job));
  }
  DDP_ASSIGN_OR_RETURN(const std::unique_ptr<Launcher> launcher, CreateLauncher("slurm"));
  DDP_ASSIGN_OR_RETURN(const std::vector<absl::Status> submitted,
                       launcher->Submit(jobs, atoi(arguments[3].c_str()), /*unfinished=*/{}));
  for (const absl::Status& status : submitted) DDP_RETURN_IF_ERROR(status);

  std::vector<std::string> ids;
  for (const BatchJob& job : jobs) {
    DDP_ASSIGN_OR_RETURN(const std::vector<std::string> of_job, ReadJobIds(job.folder));
    ids.push_back(of_job.back());
  }
  std::map<std::string, std::string> last;
  while (true) {
    DDP_ASSIGN_OR_RETURN(const auto states, launcher->Unfinished(ids));
    for (const std::string& id : ids) {
      const auto found = states.find(id);
      const std::string state = found == states.end() ? "ended" : found->second;
      if (last[id] != state) printf("%s %s\n", id.c_str(), state.c_str());
      last[id] = state;
    }
    fflush(stdout);
    if (states.empty()) return absl::OkStatus();
    absl::SleepFor(absl::Milliseconds(100));
  }
}

}  // namespace
}  // namespace ddp::launchers

int main(int argc, char** argv) {
  if (argc < 6) return 2;
  const absl::Status status = ddp::launchers::Run({argv + 1, argv + argc});
  if (status.ok()) return 0;
  fprintf(stderr, "testing_array: %s\n", std::string(status.message()).c_str());
  return 1;
}
