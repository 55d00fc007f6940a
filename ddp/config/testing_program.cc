// A program with options of its own, for tests: what it does instead of training takes no time.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/environment.h"
#include "base/file.h"
#include "base/option_error.h"
#include "base/options.h"
#include "base/process.h"
#include "ddp/config/program.h"
#include "launchers/launcher.h"

namespace {

struct ModelOptions {
  std::string name = "mlp";
  std::string config = "";  // named as one of the program's own
};
constexpr auto OptionsOf(const ModelOptions&) {
  return ddp::Options(ddp::Option("name", &ModelOptions::name, "model").OneOf("mlp", "cnn"),
                      ddp::Option("config", &ModelOptions::config, "the model's file"));
}

struct TestOptions {
  double lr = 0.5;
  int64_t seed = 0;
  std::vector<int64_t> milestones = {};
  std::string text = "";
  std::string fail = "";  // seeds that fail: "2,5"
  double seconds = 0;
  int64_t slow_from = 0;  // only this seed and those above it take `seconds`
  std::string file = "";
  std::string backend = "auto";
  std::string device = "auto";
  std::string resume = "";
  bool save = false;
  bool again = false;
  bool needs_folder = false;
  bool leaves_nothing = false;
  std::string log_dir = "";
  std::string checkpoint_dir = "";
  ModelOptions model = {};
  ddp::launchers::LaunchOptions launcher = {};
};
constexpr auto OptionsOf(const TestOptions&) {
  return ddp::Options(
      ddp::Option("lr", &TestOptions::lr, "learning rate").Above(0),
      ddp::Option("seed", &TestOptions::seed, "seed").AtLeast(0),
      ddp::Option("milestones", &TestOptions::milestones, "a list"),
      ddp::Option("text", &TestOptions::text, "any text"),
      ddp::Option("fail", &TestOptions::fail, "fail with this message").Incidental(),
      ddp::Option("seconds", &TestOptions::seconds, "sleep").Incidental(),
      ddp::Option("slow_from", &TestOptions::slow_from, "first seed that sleeps").Incidental(),
      ddp::Option("file", &TestOptions::file, "a file to write").Incidental(),
      ddp::Option("backend", &TestOptions::backend, "one, or one per device"),
      ddp::Option("device", &TestOptions::device, "cpu or not").Incidental(),
      ddp::Option("resume", &TestOptions::resume, "checkpoint to begin from"),
      ddp::Option("save", &TestOptions::save, "save a checkpoint at the start").Incidental(),
      ddp::Option("again", &TestOptions::again, "start this program once more").Incidental(),
      ddp::Option("needs_folder", &TestOptions::needs_folder, "only with checkpoint_dir"),
      ddp::Option("leaves_nothing", &TestOptions::leaves_nothing, "a dry run"),
      ddp::Option("log_dir", &TestOptions::log_dir, "folder of logs"),
      ddp::Option("checkpoint_dir", &TestOptions::checkpoint_dir, "folder of checkpoints"),
      ddp::Nested("model", &TestOptions::model, "the model"),
      ddp::Nested("launcher", &TestOptions::launcher, "how the ranks are started"));
}

}  // namespace

int main(int argc, char** argv) {
  TestOptions options;
  ddp::config::Program program(
      ddp::ListOptions(options),
      {.about = "For tests.",
       .launch = &options.launcher,
       .validate = [&]() -> absl::Status {
         if (!options.needs_folder || !options.checkpoint_dir.empty()) return absl::OkStatus();
         return ddp::OptionError("needs_folder", "true", "needs a folder: checkpoint_dir");
       },
       .sweep_metric = "test/accuracy:max",
       .implied =
           [&] {
             std::vector<std::pair<std::string, std::string>> values;
             if (options.text == "implies") {
               values = {{"lr", "0.25"}, {"model.name", "cnn"}, {"model.config", "c.yaml"}};
             } else if (options.text == "implies_metric") {
               values = {{"sweep_metric", "test/accuracy:min"}};
             }
             return values;
           },
       .job_options = {{"log_dir", "{folder}"},
                       {"checkpoint_dir", "{folder}/checkpoints"},
                       {"file", "{folder}/{name}"}},
       .resume = {.path = "resume",
                  .own = "auto",
                  .has_own =
                      [](const std::string& folder) {
                        return ddp::ReadFile(folder + "/checkpoint").ok();
                      }},
       .leaves_nothing = [&] { return options.leaves_nothing; }});
  if (const std::optional<int> code = program.Start(argc, argv)) return *code;
  // session::Run chooses in the same way.
  const auto choice = ddp::launchers::Choose(options.launcher, ddp::Environment::FromProcess());
  if (choice.ok() && !choice->rank) {
    options.launcher.argv.assign(program.argv(), program.argv() + program.argc());
    options.launcher.argv[0] = ddp::ExecutablePath(argv[0]);
    const auto result = choice->launcher->Launch(options.launcher);
    if (result.ok()) return result->exit_code;
    std::fprintf(stderr, "error: %s\n", program.Explain(result.status()).c_str());
    return 1;
  }
  const char* const gpus = std::getenv("CUDA_VISIBLE_DEVICES");
  std::printf("pid %d resume '%s' gpus '%s' text '%s'\n", getpid(), options.resume.c_str(),
              gpus == nullptr ? "" : gpus, options.text.c_str());
  std::fflush(stdout);
  if (options.again) {
    if (options.seed == 0) absl::SleepFor(absl::Seconds(options.seconds));
    const std::string path = ddp::ExecutablePath();
    execl(path.c_str(), path.c_str(), "text=again", nullptr);
    std::perror("error: exec");
    return 1;
  }
  if (options.save && !ddp::WriteFileAtomically(options.log_dir + "/checkpoint", "").ok()) return 1;
  if (options.seed >= options.slow_from) absl::SleepFor(absl::Seconds(options.seconds));
  if (!options.fail.empty()) {
    std::fprintf(stderr, "warm-up\nerror: %s\n", options.fail.c_str());
    return 3;
  }
  const double accuracy = options.lr + static_cast<double>(options.seed);
  if (!options.file.empty() && !ddp::WriteFileAtomically(options.file, "").ok()) return 1;
  if (options.log_dir.empty() || options.leaves_nothing) return 0;
  const absl::Status written = ddp::WriteFileAtomically(
      absl::StrCat(options.log_dir, "/metrics.jsonl"),
      absl::StrCat("{\"step\": 1, \"test/accuracy\": 0}\n{\"step\": 2, \"test/accuracy\": ",
                   options.text == "diverges" ? "\"NaN\"" : absl::StrCat(accuracy), "}\n"));
  return written.ok() ? 0 : 1;
}
