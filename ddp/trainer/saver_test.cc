// When a run saves, and that it does not matter to the run: by steps and by time, on a thread of
// its own, and where it is asked to stop.

#include <signal.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "checkpoint/manager.h"
#include "ddp/trainer/callback.h"
#include "ddp/trainer/saver_testing.h"
#include "ddp/trainer/stop_requests.h"
#include "ddp/trainer/trainer_testing.h"
#include "gtest/gtest.h"

namespace ddp::trainer {
namespace {

// Ranks as threads share torch's generator, whose state depends on which of them was seeded last.
void LeaveOutGenerators(TrainerOptions& options) {
  options.checkpoint.save.callback = [](checkpoint::State& state) {
    (void)state.root.erase("rng");
    for (auto& [rank, entries] : state.per_rank) (void)entries.erase("rng");
  };
}

// Every tensor anywhere in a value, with its path.
void Tensors(const std::string& path, const c10::IValue& value,
             std::map<std::string, at::Tensor>& tensors) {
  if (value.isTensor()) tensors[path] = value.toTensor();
  if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) {
      Tensors(absl::StrCat(path, "/", checkpoint::KeyText(entry.key())), entry.value(), tensors);
    }
  }
  if (value.isList()) {
    int i = 0;
    for (const c10::IValue& element : value.toListRef()) {
      Tensors(absl::StrCat(path, "/", i++), element, tensors);
    }
  }
}

std::map<std::string, at::Tensor> TensorsOf(const std::string& path, int world_size) {
  std::map<std::string, at::Tensor> tensors;
  const auto state = checkpoint::Manager::Load(path);
  EXPECT_TRUE(state.ok()) << state.status();
  if (!state.ok()) return tensors;
  Tensors("", c10::IValue(state->root), tensors);
  for (const auto& [rank, own] : state->per_rank) {
    Tensors(absl::StrCat("/per_rank/", rank), c10::IValue(own), tensors);
  }
  if (world_size > 1) {
    std::erase_if(tensors,
                  [](const auto& entry) { return absl::StrContains(entry.first, "/rng"); });
  }
  return tensors;
}

void ExpectSame(const std::string& path, const std::string& other, int world_size) {
  const auto a = TensorsOf(path, world_size), b = TensorsOf(other, world_size);
  ASSERT_EQ(a.size(), b.size());
  ASSERT_GT(a.size(), 12);
  for (const auto& [name, tensor] : a) {
    ASSERT_EQ(b.count(name), 1) << name;
    EXPECT_TRUE(at::equal(tensor, b.at(name))) << name << " of " << other;
  }
}

class SaverTest : public testing::TestWithParam<Setting> {};

const auto kNameOf = [](const auto& info) { return std::string(info.param.name); };

INSTANTIATE_TEST_SUITE_P(
    Settings, SaverTest,
    testing::Values(Setting{"one_rank_dropout", 1, "adam", 2, 0.3}, Setting{"sgd"},
                    Setting{"own_buffers", 2, "sgd", 2, 0, false},
                    Setting{"zero_1", 3, "adamw", 2, 0, true, 1},
                    Setting{"zero_2", 2, "adamw", 1, 0, true, 2},
                    Setting{"zero_2_fp16", 2, "adamw", 1, 0, true, 2, "fp16"},
                    Setting{"uneven", 3, "sgd", 2, 0, true, 0, "fp32", false},
                    Setting{"uneven_own_buffers", 3, "sgd", 1, 0, false, 0, "fp32", false},
                    Setting{"uneven_zero_2", 3, "adamw", 1, 0, true, 2, "fp32", false}),
    kNameOf);

TEST_P(SaverTest, SavesBetweenStepsChangeNothingAndEachCanBeResumed) {
  TrainerOptions options = OptionsOfRun(GetParam(), FolderFor("whole"));
  options.checkpoint.every = 2;
  const Report whole = Trained(GetParam(), options);
  const std::string last = options.checkpoint.manager.directory + "/epoch_2.pt";
  ASSERT_EQ(Names(options.checkpoint.manager.directory), std::set<std::string>{"epoch_2.pt"});

  const std::string folder = FolderFor("saves");
  options = OptionsOfRun(GetParam(), folder);
  options.checkpoint.every = 2;
  options.checkpoint.every_steps = 2;
  EXPECT_EQ(Trained(GetParam(), options).test.loss, whole.test.loss);
  ExpectSame(last, folder + "/epoch_2.pt", GetParam().world_size);
  const int64_t per_epoch = whole.steps / 2;
  std::set<std::string> expected = {"epoch_2.pt"};
  for (int64_t step = 2; step < whole.steps; step += 2) {
    const int64_t epochs = step / per_epoch;
    expected.insert(step % per_epoch == 0 ? absl::StrCat("epoch_", epochs, ".pt")
                                          : absl::StrCat("epoch_", epochs, "_step_", step, ".pt"));
  }
  EXPECT_EQ(Names(folder), expected);

  for (const std::string& name : expected) {
    SCOPED_TRACE(name);
    TrainerOptions resumed = OptionsOfRun(GetParam(), FolderFor("resumed"));
    resumed.checkpoint.every = 2;
    resumed.checkpoint.resume = absl::StrCat(folder, "/", name);
    int64_t trained = 0;  // a run from scratch ends with the same tensors
    const auto count = [&trained](int rank, TrainerOptions& mine) {
      if (rank != 0) return;
      mine.on_step = [&trained](int64_t, const at::Tensor&) {
        ++trained;
        return StepAction::kContinue;
      };
    };
    EXPECT_EQ(Trained(GetParam(), resumed, count).steps, whole.steps);
    const auto saved = checkpoint::Manager::Load(resumed.checkpoint.resume);
    ASSERT_TRUE(saved.ok()) << saved.status();
    EXPECT_EQ(trained, whole.steps - saved->root.at("step").toInt());
    if (name == "epoch_2.pt") continue;  // nothing is left to train, or to save
    ExpectSame(last, resumed.checkpoint.manager.directory + "/epoch_2.pt", GetParam().world_size);
  }
}

// Also of what only a resumed run needs, such as the buffers of each rank.
TEST_P(SaverTest, ASaveBetweenStepsHasTheBytesOfARunThatStopsThere) {
  for (const std::string format : {"pt", "sharded"}) {
    TrainerOptions options = OptionsOfRun(GetParam(), FolderFor("stopped"));
    LeaveOutGenerators(options);
    options.checkpoint.manager.format = format;
    options.checkpoint.every = 2;
    options.stop_at_step = 3;
    (void)Trained(GetParam(), options);
    // With saves before it, which must not have changed anything.
    options.stop_at_step = 4;
    options.checkpoint.every_steps = 1;
    const std::string stopped = options.checkpoint.manager.directory;
    options.checkpoint.manager.directory = FolderFor("saves");
    std::filesystem::remove_all(options.checkpoint.manager.directory);
    (void)Trained(GetParam(), options);
    const std::string name = absl::StrCat("/epoch_0_step_3.", format);
    EXPECT_TRUE(BytesIn(stopped + name) == BytesIn(options.checkpoint.manager.directory + name))
        << format;
  }
}

TEST_P(SaverTest, SavesOnAThreadHaveTheBytesOfOthers) {
  for (const std::string format : {"pt", "sharded", "safetensors"}) {
    SCOPED_TRACE(format);
    TrainerOptions options = OptionsOfRun(GetParam(), FolderFor("last_only"));
    LeaveOutGenerators(options);
    options.checkpoint.manager.format = format;
    options.checkpoint.every = 2;
    const Report whole = Trained(GetParam(), options);
    const std::string last =
        absl::StrCat(options.checkpoint.manager.directory, "/epoch_2.", format);

    options.checkpoint.every = 1;
    options.checkpoint.every_steps = 3;
    std::string folders[2];
    for (const bool async : {false, true}) {
      options.checkpoint.async = async;
      // Without it, rank 0 gathers into the copy.
      options.checkpoint.check_staging = async && format != "pt";
      folders[async] = FolderFor(async ? "async" : "sync");
      options.checkpoint.manager.directory = folders[async];
      std::filesystem::remove_all(folders[async]);
      EXPECT_EQ(Trained(GetParam(), options).test.loss, whole.test.loss);
    }
    EXPECT_GE(Names(folders[0]).size(), 4);
    EXPECT_EQ(Names(folders[0]), Names(folders[1]));
    for (const std::string& name : Names(folders[0])) {
      EXPECT_TRUE(BytesIn(absl::StrCat(folders[0], "/", name)) ==
                  BytesIn(absl::StrCat(folders[1], "/", name)))
          << name;
    }
    for (const std::string& folder : folders) {
      EXPECT_TRUE(BytesIn(last) == BytesIn(absl::StrCat(folder, "/epoch_2.", format))) << folder;
    }
  }
}

// Sends this process a signal when a batch is read for the so-manyth time. An example that is read
// alone, before the training, is none.
class SignalInGet final : public Halves {
 public:
  SignalInGet(int signal, int after) : Halves(60), signal_(signal), left_(after) {}
  data::Batch Get(absl::Span<const int64_t> indices) const override {
    if (indices.size() > 1 && --left_ == 0) raise(signal_);
    return Halves::Get(indices);
  }

 private:
  const int signal_;
  mutable std::atomic<int> left_;
};

struct Stop {
  std::string where;
  // Checkpoints of the run that is stopped, the last of which it names.
  std::vector<std::string> names;
  int64_t epochs = 0;
  bool evaluated = false;
};

TEST_P(SaverTest, StoppedByASignalAnywhereAndResumedIsTheUninterruptedRun) {
  TrainerOptions options = OptionsOfRun(GetParam(), FolderFor("whole"));
  const SignalInGet no_signal(0, 0);
  const Report whole = Trained(GetParam(), options, nullptr, no_signal);
  EXPECT_EQ(whole.end.Name(), "end");
  const std::string last = options.checkpoint.manager.directory + "/epoch_2.pt";
  const std::string end = absl::StrCat("epoch_0_step_", whole.steps / 2);
  for (const Stop& stop : std::vector<Stop>{
           {"step", {"epoch_0_step_2"}, 0, false},
           {"save within the epoch", {"epoch_0_step_2"}, 0, false},
           {"last step", {end}, 0, false},
           {"evaluation", {end}, 0, false},
           {"save", {"epoch_1"}, 1, true},
       }) {
    SCOPED_TRACE(stop.where);
    options = OptionsOfRun(GetParam(), FolderFor("stopped"));
    const int64_t at = stop.where == "last step" ? whole.steps / 2 : 2;
    const bool in_step = stop.where == "step" || stop.where == "last step";
    // For all ranks, which are threads: a further signal a second later would end the process.
    std::atomic<bool> has_raised = false;
    if (in_step) {
      options.on_step = [at, &has_raised](int64_t step, const at::Tensor&) {
        if (step == at && !has_raised) has_raised = raise(SIGUSR2) == 0;
        return StepAction::kContinue;
      };
    }
    if (stop.where == "save within the epoch") options.checkpoint.every_steps = 2;
    if (absl::StartsWith(stop.where, "save")) {
      options.checkpoint.save.callback = [](checkpoint::State&) { raise(SIGUSR2); };
    }
    const SignalInGet test(SIGUSR2, stop.where == "evaluation" ? 1 : 0);
    const Report report = Trained(GetParam(), options, nullptr, test);
    const std::string folder = options.checkpoint.manager.directory;
    EXPECT_EQ(report.end.Name(), "signal USR2");
    EXPECT_EQ(report.epochs, stop.epochs);
    EXPECT_EQ(report.test.examples > 0, stop.evaluated);
    EXPECT_EQ(report.end.saved, absl::StrCat(folder, "/", stop.names.back(), ".pt"));
    std::set<std::string> names;
    for (const std::string& name : stop.names) names.insert(name + ".pt");
    EXPECT_EQ(Names(folder), names);

    options = OptionsOfRun(GetParam(), FolderFor("resumed"));
    options.checkpoint.resume = report.end.saved;
    options.log.dir = options.checkpoint.manager.directory + "_log";
    std::filesystem::remove_all(options.log.dir);
    const Report resumed = Trained(GetParam(), options, nullptr, no_signal);
    EXPECT_EQ(resumed.steps, whole.steps);
    EXPECT_EQ(resumed.test.loss, whole.test.loss);
    ExpectSame(last, options.checkpoint.manager.directory + "/epoch_2.pt", GetParam().world_size);
    // The evaluation that was given up is made, and written down.
    EXPECT_EQ(Logged(options.log.dir, "test/loss").size(), stop.evaluated ? 1 : 2);
  }
}

TEST(StopTest, WhenItsTimeIsOver) {
  const Setting setting{"sgd"};
  TrainerOptions options;
  // The smallest counts.
  for (const int least : {0, 1}) {
    SCOPED_TRACE(absl::StrCat("rank ", least));
    options = OptionsOfRun(setting, FolderFor(absl::StrCat("a", least)));
    options.log.dir = FolderFor(absl::StrCat("log", least));
    std::filesystem::remove_all(options.log.dir);
    const Report report = Trained(setting, options, [&](int rank, TrainerOptions& mine) {
      mine.max_time = rank == least ? absl::Milliseconds(1)
                      : least == 0  ? absl::ZeroDuration()
                                    : absl::Hours(1);
    });
    EXPECT_EQ(report.end.Name(), "max_time");
    EXPECT_EQ(report.end.status(), absl::OkStatus());
    EXPECT_LE(report.steps, 2);
    const std::string path =
        absl::StrCat(options.checkpoint.manager.directory, "/epoch_0_step_", report.steps, ".pt");
    EXPECT_EQ(report.end.saved, path);
    EXPECT_EQ(report.test.examples, 0);
    EXPECT_EQ(Summary(report, 1.25),
              absl::StrCat("stopped by max_time after step ", report.steps, ": saved ", path,
                           "\ntest not evaluated epochs 0 wall 1.2 s"));
    EXPECT_TRUE(absl::StrContains(
        ReadFile(options.log.dir + "/metrics.jsonl").value_or(""),
        absl::StrCat("\"event\":\"run_end\",\"reason\":\"max_time\",\"saved\":\"", path, "\"}\n")));
  }

  // A long time is no reason to stop, unless a save takes as long.
  options = OptionsOfRun(setting, FolderFor("b"));
  options.max_time = absl::Hours(1);
  EXPECT_EQ(Trained(setting, options).end.Name(), "end");
}

TEST(StopTest, MaxTimeLeavesRoomForASave) {
  TrainerOptions options = Quiet();
  options.max_time = absl::Hours(1);
  for (const bool takes_long : {false, true}) {
    StopRequests stops(nullptr, /*rank=*/0, /*world_size=*/1, options, absl::Now(),
                       [=] { return takes_long ? absl::Hours(2) : absl::ZeroDuration(); });
    const absl::StatusOr<bool> goes_on = stops.GoOn();
    ASSERT_TRUE(goes_on.ok()) << goes_on.status();
    EXPECT_EQ(*goes_on, !takes_long);
    stops.Close();
  }
}

TEST(StopTest, ASignalWithoutAFolderStopsAndSavesNothing) {
  TrainerOptions options = Quiet();
  // For all ranks, which are threads: a further signal a second later would end the process.
  std::atomic<bool> has_raised = false;
  options.on_step = [&](int64_t step, const at::Tensor&) {
    if (step == 3 && !has_raised) has_raised = raise(SIGTERM) == 0;
    return StepAction::kContinue;
  };
  const Report report = Trained({}, options);
  EXPECT_EQ(report.steps, 3);
  EXPECT_EQ(report.end.Name(), "signal TERM");
  EXPECT_EQ(ExitCodeIn(report.end.status()), 128 + SIGTERM);
  EXPECT_TRUE(absl::StartsWith(Summary(report, 1),
                               "stopped by signal TERM after step 3: nothing was saved\n"));
}

// A run that stops for another reason still evaluates; a signal interrupts that.
TEST(StopTest, ASignalDuringTheEvaluationOfAStoppedRun) {
  const Setting setting{"sgd"};
  for (const bool by_callback : {false, true}) {
    // 11 is the last step of the epoch.
    for (const int64_t at : {3, 11}) {
      SCOPED_TRACE(absl::StrCat(by_callback, " ", at));
      for (const bool signal : {false, true}) {
        TrainerOptions options = OptionsOfRun(setting, FolderFor("a"));
        if (by_callback) {
          options.on_step = [at](int64_t step, const at::Tensor&) {
            return step == at ? StepAction::kStop : StepAction::kContinue;
          };
        } else {
          options.stop_at_step = at;
        }
        const SignalInGet test(SIGINT, signal ? 1 : 0);
        const Report report = Trained(setting, options, nullptr, test);
        EXPECT_EQ(report.steps, at);
        EXPECT_EQ(report.end.Name(), signal        ? "signal INT"
                                     : by_callback ? "callback"
                                                   : "stop_at_step");
        EXPECT_EQ(report.test.examples > 0, !signal);
        EXPECT_EQ(report.end.saved, absl::StrCat(options.checkpoint.manager.directory,
                                                 at == 3  ? "/epoch_0_step_3.pt"
                                                 : signal ? "/epoch_0_step_11.pt"
                                                          : "/epoch_1.pt"));
      }
    }
  }
}

TEST(StopTest, OnlyTheSignalsThatAreAskedFor) {
  TrainerOptions options = Quiet();
  options.stop_signals = {"USR1"};
  options.on_step = [](int64_t, const at::Tensor&) {
    struct sigaction term, usr1;
    sigaction(SIGTERM, nullptr, &term);
    sigaction(SIGUSR1, nullptr, &usr1);
    EXPECT_EQ(term.sa_handler, SIG_DFL);
    EXPECT_NE(usr1.sa_handler, SIG_DFL);
    return StepAction::kContinue;
  };
  signal(SIGTERM, SIG_DFL);
  EXPECT_EQ(Trained({}, options).end.Name(), "end");
  options.stop_signals = {"KILL"};
  EXPECT_TRUE(absl::StrContains(Validate(options).message(),
                                "KILL is no signal that a run can be stopped by"))
      << Validate(options);
  options.stop_signals = {"TERM", "INT", "TERM"};
  EXPECT_TRUE(absl::StrContains(Validate(options).message(), "stop_signals=TERM is given twice"))
      << Validate(options);
}

TEST(SaveTimesTest, EpochsStepsAndNone) {
  const Setting setting{"sgd"};
  const auto saved = [&](int64_t every, int64_t steps, int64_t stop) {
    TrainerOptions options = OptionsOfRun(setting, FolderFor("times"));
    options.checkpoint.every = every;
    options.checkpoint.every_steps = steps;
    options.stop_at_step = stop;
    (void)Trained(setting, options);
    return Names(options.checkpoint.manager.directory);
  };
  using Set = std::set<std::string>;
  EXPECT_EQ(saved(0, 0, 0), Set());
  // Not at the end of epoch 1; the end of the run is saved in any case.
  EXPECT_EQ(saved(0, 9, 0), (Set{"epoch_0_step_9.pt", "epoch_1_step_18.pt", "epoch_2.pt"}));
  // A save that is due at the end of an epoch is that of the epoch.
  EXPECT_EQ(saved(0, 11, 0), (Set{"epoch_1.pt", "epoch_2.pt"}));
  EXPECT_EQ(saved(1, 100, 0), (Set{"epoch_1.pt", "epoch_2.pt"}));
  EXPECT_EQ(saved(0, 4, 8), (Set{"epoch_0_step_4.pt", "epoch_0_step_8.pt"}));
  EXPECT_EQ(saved(0, 4, 9), (Set{"epoch_0_step_4.pt", "epoch_0_step_8.pt", "epoch_0_step_9.pt"}));
}

// Where only saves by steps are asked for, and none is due.
TEST(SaveTimesTest, AStopAtTheEndOfAnEpochIsSaved) {
  const Setting setting{"sgd"};
  TrainerOptions options = OptionsOfRun(setting, FolderFor("run"));
  options.checkpoint.every = 0;
  options.checkpoint.every_steps = 100;
  options.stop_at_step = 11;
  (void)Trained(setting, options);
  EXPECT_EQ(Names(options.checkpoint.manager.directory), std::set<std::string>{"epoch_1.pt"});
}

TEST(SaveTimesTest, TheTimeBeginsAnewWithEachSave) {
  constexpr double kEvery = 0.2;  // seconds
  const Setting setting{"sgd", 1};
  TrainerOptions options = OptionsOfRun(setting, FolderFor("run"));
  options.checkpoint.every = 0;
  options.checkpoint.every_minutes = kEvery / 60;
  options.on_step = [](int64_t, const at::Tensor&) {
    absl::SleepFor(absl::Milliseconds(20));
    return StepAction::kContinue;
  };
  const absl::Time began = absl::Now();
  (void)Trained(setting, options);
  const double seconds = absl::ToDoubleSeconds(absl::Now() - began);
  const size_t saves = Names(options.checkpoint.manager.directory).size();
  EXPECT_GE(saves, 2u);
  EXPECT_LE(static_cast<double>(saves), seconds / kEvery + 1);  // one at the end in any case
}

TEST(SaveTimesTest, ByRank0sClockAtAStepOfAllRanks) {
  for (const int world_size : {1, 3}) {
    for (const bool async : {false, true}) {
      const Setting setting{"sgd", world_size};
      TrainerOptions options = OptionsOfRun(setting, FolderFor("minutes"));
      options.checkpoint.every = 0;
      options.checkpoint.async = async;
      options.checkpoint.every_minutes = 1e6;
      (void)Trained(setting, options);
      EXPECT_EQ(Names(options.checkpoint.manager.directory), std::set<std::string>{"epoch_2.pt"});
      // Always due, and at each step or the next.
      options = OptionsOfRun(setting, FolderFor("minutes"));
      options.checkpoint.every = 0;
      options.checkpoint.async = async;
      options.checkpoint.every_minutes = 1e-12;
      const Report report = Trained(setting, options);
      const std::set<std::string> names = Names(options.checkpoint.manager.directory);
      EXPECT_GE(names.size(), report.steps / 2 - 1);
      EXPECT_EQ(names.count("epoch_2.pt"), 1);
      for (const std::string& name : names) {
        const auto state = checkpoint::Manager::Load(
            absl::StrCat(options.checkpoint.manager.directory, "/", name));
        EXPECT_TRUE(state.ok()) << state.status();
      }
    }
  }
}

TEST(SaveTimesTest, ContinuousSavesFollowEachOther) {
  const Setting setting{"zero_1", 2, "adamw", 1, 0, true, 1};
  for (const std::string format : {"pt", "sharded"}) {
    TrainerOptions options = OptionsOfRun(setting, FolderFor("whole"));
    options.epochs = 8;
    options.checkpoint.manager.format = format;
    LeaveOutGenerators(options);
    options.checkpoint.every = 8;
    (void)Trained(setting, options);
    const std::string last =
        absl::StrCat(options.checkpoint.manager.directory, "/epoch_8.", format);
    options.checkpoint.every = 0;
    options.checkpoint.continuous = true;
    options.checkpoint.check_staging = true;
    options.checkpoint.manager.directory = FolderFor("continuous");
    const std::string folder = options.checkpoint.manager.directory;
    std::filesystem::remove_all(folder);
    (void)Trained(setting, options, [&](int rank, TrainerOptions& mine) {
      if (rank != 0) return;
      // The first save has begun by step 2, and the second once that is on disk.
      mine.on_step = [&](int64_t step, const at::Tensor&) {
        while (step % 30 == 0 && static_cast<int64_t>(Names(folder).size()) < step / 30) {
          std::this_thread::yield();
        }
        return StepAction::kContinue;
      };
    });
    const std::set<std::string> names = Names(folder);
    EXPECT_GE(names.size(), 3);
    EXPECT_TRUE(BytesIn(absl::StrCat(options.checkpoint.manager.directory, "/epoch_8.", format)) ==
                BytesIn(last));
  }
}

class AsksInEvaluations final : public Callback {
 public:
  std::string name() const override { return "asks"; }
  absl::Status OnEvaluationBegin(CallbackContext& run) override {
    run.RequestStop("enough");
    return absl::OkStatus();
  }
};

// The request alone lets the evaluation end.
TEST(StopTest, ASignalThatEndsAnEvaluationCountsMoreThanAnEarlierRequest) {
  const Setting setting{"sgd"};
  for (const bool signal : {false, true}) {
    const TrainerOptions options = OptionsOfRun(setting, FolderFor("run"));
    const SignalInGet test(SIGUSR2, signal ? 1 : 0);
    const auto ask = [](int, TrainerOptions& mine) {
      mine.callbacks.push_back(std::make_shared<AsksInEvaluations>());
    };
    const Report report = Trained(setting, options, ask, test);
    EXPECT_EQ(report.end.Name(), signal ? "signal USR2" : "callback");
    EXPECT_EQ(report.end.status().ok(), !signal);
    EXPECT_EQ(report.epochs, signal ? 0 : 1);
  }
}

// A run that ends has no next save.
TEST(StopTest, ASaveThatFailsAtTheEndIsTheRunsError) {
  const Setting setting{"sgd"};
  for (const bool async : {false, true}) {
    for (const std::string name : {"epoch_0_step_3.", "epoch_0_step_11.", "epoch_1.", "epoch_2."}) {
      SCOPED_TRACE(absl::StrCat(name, async));
      TrainerOptions options = OptionsOfRun(setting, FolderFor("run"));
      options.checkpoint.async = async;
      options.checkpoint.manager.on_save_error = "continue";
      const int64_t at = name == "epoch_0_step_3." ? 3 : name == "epoch_0_step_11." ? 11 : 0;
      if (name == "epoch_1.") options.stop_at_step = 11;
      // For all ranks, which are threads: a further signal a second later would end the process.
      std::atomic<bool> has_raised = false;
      options.on_step = [at, &has_raised](int64_t step, const at::Tensor&) {
        if (step == at && !has_raised) has_raised = raise(SIGUSR2) == 0;
        return StepAction::kContinue;
      };
      Disk disk(name, ENOSPC);
      const auto reports = TrainRanks(setting, options, [&](int rank, TrainerOptions& mine) {
        if (rank == 0) mine.checkpoint.manager.files = &disk;
      });
      for (const auto& report : reports) {
        EXPECT_EQ(report.status().code(), absl::StatusCode::kResourceExhausted) << report.status();
      }
    }
  }
}

// Stands for NFS and other file systems without RENAME_EXCHANGE.
class WithoutExchange : public FileSystem {
  int Exchange(const char*, const char*) override {
    errno = EINVAL;
    return -1;
  }
};

// Its checkpoint is there already, under the name that it would have again.
TEST(StopTest, TwiceInOneEvaluation) {
  const Setting setting{"sgd"};
  TrainerOptions options = OptionsOfRun(setting, FolderFor("run"));
  WithoutExchange files;
  options.checkpoint.manager.files = &files;
  options.checkpoint.manager.format = "sharded";
  const std::string saved = options.checkpoint.manager.directory + "/epoch_0_step_11.sharded";
  for (const std::string resume : {"", "auto", saved.c_str()}) {
    options.checkpoint.resume = resume;
    const SignalInGet stopping(SIGUSR2, 1);
    const Report report = Trained(setting, options, nullptr, stopping);
    EXPECT_EQ(report.end.Name(), "signal USR2");
    EXPECT_EQ(report.end.saved, saved);
    EXPECT_EQ(report.epochs, 0);
  }
  options.checkpoint.resume = "auto";
  EXPECT_EQ(Trained(setting, options).epochs, 2);
  EXPECT_EQ(
      Names(options.checkpoint.manager.directory),
      (std::set<std::string>{"epoch_0_step_11.sharded", "epoch_1.sharded", "epoch_2.sharded"}));
}

}  // namespace
}  // namespace ddp::trainer
