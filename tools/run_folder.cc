#include "tools/run_folder.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/file.h"
#include "checkpoint/folder.h"
#include "checkpoint/name.h"
#include "checkpoint/stateful.h"
#include "ddp/config/effective.h"
#include "ddp/config/run_record.h"
#include "ddp/session/session.h"
#include "ddp/trainer/callback.h"

namespace ddp::tools {

namespace {

class RunRecorder final : public trainer::Callback {
 public:
  RunRecorder(const config::Program& program, std::string folder)
      : program_(program), folder_(std::move(folder)) {}

  std::string name() const override { return "run_record"; }

  absl::Status OnStart(trainer::CallbackContext& run) override {
    const session::Session& ranks = run.session();
    if (!ranks.is_main()) return absl::OkStatus();
    const int nnodes = std::max(1, ranks.size() / ranks.place().local_world_size);
    return WriteFileAtomically(absl::StrCat(folder_, "/", config::kRunRecordFile),
                               program_.RunRecord(ranks.size(), nnodes));
  }

 private:
  const config::Program& program_;
  const std::string folder_;
};

// Whether the option says what the run computes, as opposed to where it runs and what it leaves.
bool IsOfTheResult(absl::string_view path) {
  for (const absl::string_view group : {"launcher.", "checkpoint.", "log.", "group.", "stop_"}) {
    if (absl::StartsWith(path, group)) return false;
  }
  return path != "predictions" && path != "eval_only" && path != "dry_run";
}

}  // namespace

void RecordRun(const config::Program& program, trainer::TrainerOptions& options) {
  options.hyper_parameters = program.options().Table();
  options.configuration = program.Configuration();
  options.compare_configuration = [list = &program.options(), now = options.configuration](
                                      const std::string& saved, checkpoint::LoadNotes& notes) {
    for (const config::OptionDifference& one : config::Differences(*list, now, saved)) {
      if (IsOfTheResult(one.path)) notes.AddConfigured(one.path, one.now, one.then);
    }
  };
  for (const char* const name : {"log_dir", "redirects", "tee"}) {
    if (!options.dry_run) break;
    program.options().Set(absl::StrCat("launcher.local.", name), "").IgnoreError();
  }
  if (options.log.dir.empty() || options.eval_only || options.dry_run) return;
  options.callbacks.push_back(std::make_shared<RunRecorder>(program, options.log.dir));
}

config::ResumeOption ResumeOf(const trainer::TrainerOptions& options) {
  return {.path = "checkpoint.resume",
          .own = "auto",
          .has_own = &HasCheckpoint,
          .folder = "checkpoint.dir",
          .needs_own = [&options] {
            const trainer::CheckpointOptions& checkpoint = options.checkpoint;
            const bool from_folder = checkpoint.resume == "auto" || checkpoint.resume == "best";
            return options.eval_only && from_folder && checkpoint.init_from.empty();
          }};
}

bool HasCheckpoint(const std::string& folder) {
  const absl::StatusOr<std::vector<std::string>> names =
      ListDirectory(absl::StrCat(folder, "/checkpoints"));
  // "epoch_3.pt", but not "epoch_3.pt.damaged".
  return names.ok() && std::any_of(names->begin(), names->end(), [](const std::string& name) {
           return checkpoint::ParseName(name.substr(0, name.find('.'))).has_value() &&
                  checkpoint::DamagedOf(name).empty();
         });
}

}  // namespace ddp::tools
