#include "ddp/trainer/schedule.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <numbers>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/runfiles.h"
#include "ddp/trainer/plateau.h"
#include "gtest/gtest.h"

namespace ddp::trainer {
namespace {

Schedule Make(const ScheduleOptions& options, const RunLength& length) {
  return *Schedule::Create(options, length);
}

// As a checkpoint of `schedule` after `step` steps has it.
SavedProgress SavedAt(const Schedule& schedule, int64_t step) {
  return {.progress = schedule.Progress(step),
          .total_steps = schedule.total_steps(),
          .steps_per_epoch = schedule.steps_per_epoch(),
          .pace = schedule.pace(),
          .samples_per_step = schedule.length().samples_per_step};
}

const Registration<ScheduleRegistry> kHalving("halving",
                                              ScheduleEntry{.factor = [](const ScheduleOptions&,
                                                                         const ScheduleTime& now) {
                                                return std::pow(0.5, now.time);
                                              }});

TEST(ScheduleTest, ConstantWithWarmUp) {
  const Schedule schedule = Make({.name = "constant", .warmup_steps = 4}, {});
  EXPECT_DOUBLE_EQ(schedule.Factor(0), 0.25);
  EXPECT_DOUBLE_EQ(schedule.Factor(3), 1.0);
  EXPECT_DOUBLE_EQ(schedule.Factor(1000), 1.0);
}

TEST(ScheduleTest, StepDecaysEveryFewEpochs) {
  const Schedule schedule = Make({.name = "step", .step_epochs = 0.5, .gamma = 0.5},
                                 {.epochs = 3, .steps_per_epoch = 20});
  EXPECT_DOUBLE_EQ(schedule.Factor(9), 1.0);
  EXPECT_DOUBLE_EQ(schedule.Factor(10), 0.5);
  EXPECT_DOUBLE_EQ(schedule.Factor(25), 0.25);
}

TEST(ScheduleTest, CosineGoesFromOneToZeroAfterWarmUp) {
  const Schedule schedule =
      Make({.name = "cosine", .warmup_steps = 10}, {.epochs = 11, .steps_per_epoch = 10});
  EXPECT_DOUBLE_EQ(schedule.Factor(10), 1.0);
  EXPECT_NEAR(schedule.Factor(60), 0.5, 1e-12);
  EXPECT_NEAR(schedule.Factor(110), 0.0, 1e-12);
  EXPECT_NEAR(schedule.Factor(500), 0.0, 1e-12);
}

TEST(ScheduleTest, ItEndsWithWhatEndsTheRunFirst) {
  for (const int64_t max_steps : {0, 20, 1000}) {
    const RunLength length = {.epochs = 10, .steps_per_epoch = 10, .max_steps = max_steps};
    const Schedule schedule = Make({.name = "cosine"}, length);
    const int64_t last = max_steps == 20 ? 20 : 100;
    EXPECT_EQ(schedule.total_steps(), last);
    EXPECT_NEAR(schedule.Factor(last / 2), 0.5, 1e-12);
    EXPECT_NEAR(schedule.Factor(last), 0.0, 1e-12);
  }
}

TEST(ScheduleTest, ARunOfNoStepsHasASchedule) {
  EXPECT_DOUBLE_EQ(Make({.name = "cosine"}, {.epochs = 0, .steps_per_epoch = 0}).Factor(0), 1.0);
  EXPECT_EQ(
      Make({.name = "step", .step_epochs = 0.001}, {.epochs = 1, .steps_per_epoch = 2}).step_size(),
      1);
}

// What each step of a run in one world has always had, resumed or not.
double FactorOfOneWorld(const ScheduleOptions& options, int64_t total, int64_t step_size,
                        int64_t step) {
  if (step < options.warmup_steps) {
    return static_cast<double>(step + 1) / static_cast<double>(options.warmup_steps);
  }
  const int64_t since = step - options.warmup_steps;
  if (options.name == "step") {
    return std::pow(options.gamma, static_cast<double>(since / step_size));
  }
  if (options.name == "constant") return 1;
  const double progress =
      std::min(1.0, static_cast<double>(since) / static_cast<double>(total - options.warmup_steps));
  return (1.0 + std::cos(std::numbers::pi * progress)) / 2.0;
}

TEST(ScheduleTest, InOneWorldAResumedRunHasTheSameBits) {
  const RunLength length = {.epochs = 7, .steps_per_epoch = 13};
  for (const std::string name : {"constant", "step", "cosine"}) {
    for (const int64_t warmup : {0, 11}) {
      const ScheduleOptions options = {.name = name, .warmup_steps = warmup, .gamma = 0.3};
      const Schedule whole = Make(options, length);
      for (int64_t step = 0; step < 91; ++step) {
        ASSERT_EQ(whole.Factor(step), FactorOfOneWorld(options, 91, 13, step)) << name << step;
      }
      for (int64_t stop = 0; stop <= 91; ++stop) {
        const Schedule resumed = whole.Resumed(SavedAt(whole, stop), stop, 91 - stop);
        for (int64_t step = stop; step < 91; ++step) {
          ASSERT_EQ(resumed.Factor(step), whole.Factor(step)) << name << stop << " " << step;
        }
      }
    }
  }
}

// From 2 ranks to 1, and the reverse: twice and half the steps per epoch.
TEST(ScheduleTest, InAnotherWorldItGoesOnAndEndsWithTheRun) {
  for (const int64_t remaining : {120, 30}) {
    const Schedule first = Make({.name = "cosine"}, {.epochs = 2, .steps_per_epoch = 40});
    const Schedule there =
        Make({.name = "cosine"}, {.epochs = 2, .steps_per_epoch = remaining * 4 / 6});
    const Schedule second = there.Resumed(SavedAt(first, 20), 20, remaining);
    EXPECT_EQ(second.Factor(20), first.Factor(20));
    for (int64_t k = 0; k <= remaining; ++k) {
      const double progress = 0.25 + 0.75 * static_cast<double>(k) / static_cast<double>(remaining);
      EXPECT_NEAR(second.Factor(20 + k), (1 + std::cos(std::numbers::pi * progress)) / 2, 1e-12);
      EXPECT_NEAR(second.Progress(20 + k), progress, 1e-12);
    }
    // Stopped once more, in the same world: the same bits.
    const int64_t stop = 20 + remaining / 3;
    const Schedule third = there.Resumed(SavedAt(second, stop), stop, 20 + remaining - stop);
    for (int64_t step = stop; step <= 20 + remaining; ++step) {
      EXPECT_EQ(third.Factor(step), second.Factor(step)) << step;
    }
  }
}

TEST(ScheduleTest, InAnotherWorldTheRestOfWarmUpIsSpreadLikewise) {
  const ScheduleOptions options = {.name = "constant", .warmup_steps = 8};
  const Schedule first = Make(options, {.epochs = 1, .steps_per_epoch = 20});
  const SavedProgress saved = SavedAt(first, 4);
  const Schedule slower = Make(options, {.epochs = 1, .steps_per_epoch = 40}).Resumed(saved, 4, 32);
  for (int64_t k = 0; k < 8; ++k) {
    EXPECT_NEAR(slower.Factor(4 + k), (4.5 + 0.5 * static_cast<double>(k)) / 8, 1e-12);
  }
  EXPECT_EQ(slower.Factor(12), 1);
  const Schedule faster = Make(options, {.epochs = 1, .steps_per_epoch = 5}).Resumed(saved, 4, 4);
  EXPECT_EQ(faster.Factor(4), 1);  // a step there is four here
  EXPECT_EQ(faster.Factor(7), 1);
}

TEST(ScheduleTest, InAnotherWorldDecaysAreAtTheSameEpochs) {
  const ScheduleOptions options = {.name = "step", .step_epochs = 1, .gamma = 0.5};
  const Schedule first = Make(options, {.epochs = 4, .steps_per_epoch = 30});
  // A third of the ranks, from half of epoch 2 on: 45 steps are left of it.
  const Schedule second =
      Make(options, {.epochs = 4, .steps_per_epoch = 90}).Resumed(SavedAt(first, 45), 45, 225);
  EXPECT_DOUBLE_EQ(second.Factor(45 + 44), 0.5);
  EXPECT_DOUBLE_EQ(second.Factor(45 + 45), 0.25);
  EXPECT_DOUBLE_EQ(second.Factor(45 + 45 + 89), 0.25);
  EXPECT_DOUBLE_EQ(second.Factor(45 + 45 + 90), 0.125);
}

TEST(ScheduleTest, ALongerRunStretchesTheCosineAndNotTheDecays) {
  const RunLength length = {.epochs = 2, .steps_per_epoch = 10};
  const RunLength longer = {.epochs = 4, .steps_per_epoch = 10};
  const Schedule cosine = Make({.name = "cosine"}, length);
  const Schedule stretched = Make({.name = "cosine"}, longer).Resumed(SavedAt(cosine, 10), 10, 30);
  EXPECT_NEAR(stretched.Factor(10), 0.5, 1e-12);
  EXPECT_NEAR(stretched.Factor(25), cosine.Factor(15), 1e-12);
  EXPECT_NEAR(stretched.Factor(40), 0, 1e-12);
  const Schedule ended = Make({.name = "cosine"}, longer).Resumed(SavedAt(cosine, 20), 20, 20);
  EXPECT_NEAR(ended.Factor(20), 0, 1e-12);
  EXPECT_NEAR(ended.Factor(39), 0, 1e-12);
  const ScheduleOptions by_epochs = {.name = "step", .step_epochs = 1, .gamma = 0.5};
  const Schedule step = Make(by_epochs, length);
  for (const int64_t stop : {10, 20}) {
    const Schedule on = Make(by_epochs, longer).Resumed(SavedAt(step, stop), stop, 40 - stop);
    EXPECT_EQ(on.Factor(29), 0.25);
    EXPECT_EQ(on.Factor(30), 0.125);
  }
}

// All that a program may ask for goes on with the same bits in its world, and in another one is the
// same function of the part that is done.
TEST(ScheduleTest, EachScheduleFollowsTheExamples) {
  for (const std::string name :
       {"multistep", "polynomial", "linear", "onecycle", "plateau", "halving", "lambda"}) {
    ScheduleOptions options = {.name = name == "lambda" ? "constant" : name};
    if (name == "multistep") options.milestones = {0.5, 2};
    if (name != "onecycle") options.warmup_epochs = 0.2;
    const LrLambda lambda = [](double progress, int64_t) { return 1 - progress * progress; };
    const auto make = [&](int64_t steps_per_epoch) {
      return *Schedule::Create(options, {.epochs = 4, .steps_per_epoch = steps_per_epoch},
                               name == "lambda" ? lambda : nullptr);
    };
    const Schedule whole = make(20);
    for (const int64_t stop : {0, 3, 4, 30, 80}) {
      const Schedule resumed = make(20).Resumed(SavedAt(whole, stop), stop, 80 - stop);
      for (int64_t step = stop; step < 80; ++step) {
        ASSERT_EQ(resumed.Factor(step), whole.Factor(step)) << name << stop << " " << step;
      }
    }
    // Half of the ranks after step 30: 100 steps are left, of which two are one.
    const Schedule slower = make(40).Resumed(SavedAt(whole, 30), 30, 100);
    for (int64_t k = 0; k < 50; ++k) {
      EXPECT_NEAR(slower.Factor(30 + 2 * k), whole.Factor(30 + k), 1e-12) << name << k;
    }
    EXPECT_EQ(slower.warmup(), whole.warmup());
  }
}

// Of a loop that ends when it likes.
TEST(ScheduleTest, ARunWithoutALengthGoesOnWhereItWas) {
  const RunLength none = {.is_known = false};
  const LrLambda lambda = [](double progress, int64_t step) {
    EXPECT_EQ(progress, 0);
    return 1 / (1 + static_cast<double>(step));
  };
  for (const bool is_own : {false, true}) {
    const Schedule whole =
        *Schedule::Create({.warmup_steps = 100}, none, is_own ? lambda : nullptr);
    EXPECT_EQ(whole.total_steps(), 0);
    EXPECT_EQ(whole.Progress(500), 0);
    const auto expect_same = [&](const SavedProgress& saved, int64_t stop) {
      const Schedule resumed = whole.Resumed(saved, stop, {0, std::nullopt});
      for (int64_t step = stop; step < stop + 200; ++step) {
        ASSERT_EQ(resumed.Factor(step), whole.Factor(step)) << is_own << stop << " " << step;
      }
    };
    for (const int64_t stop : {0, 40, 500}) expect_same(SavedAt(whole, stop), stop);
    // As earlier versions have saved it, and without all but the progress.
    expect_same({.progress = 1, .pace = Pace()}, 500);
    expect_same({.total_steps = 0}, 500);
    // The loop has got a length.
    const Schedule cosine = Make({.name = "cosine"}, {.steps_per_epoch = 1000, .max_steps = 1000})
                                .Resumed(SavedAt(whole, 500), 500, {500, std::nullopt});
    EXPECT_NEAR(cosine.Factor(500), 0.5, 1e-12);
    EXPECT_NEAR(cosine.Factor(1000), 0, 1e-12);
  }
}

// A loop of more epochs than the schedule knows of: 20 steps each.
TEST(ScheduleTest, DecaysGoOnBehindTheEndOfTheRun) {
  const ScheduleOptions options = {.name = "step", .step_epochs = 1, .gamma = 0.5};
  const Schedule whole = Make(options, {.epochs = 1, .steps_per_epoch = 20});
  for (const int64_t stop : {10, 20, 50, 90}) {
    const Schedule resumed =
        whole.Resumed(SavedAt(whole, stop), stop, {std::max<int64_t>(0, 20 - stop), 20 - stop});
    for (int64_t step = stop; step < 200; ++step) {
      ASSERT_EQ(resumed.Factor(step), whole.Factor(step)) << stop << " " << step;
    }
  }
  // Half of the ranks from the middle of the fourth epoch on.
  const Schedule there = Make(options, {.epochs = 1, .steps_per_epoch = 40});
  const Schedule slower = there.Resumed(SavedAt(whole, 70), 70, {0, 20 - 3 * 40});
  EXPECT_EQ(slower.Factor(70 + 19), 0.125);
  EXPECT_EQ(slower.Factor(70 + 20), 0.0625);
  EXPECT_EQ(slower.Factor(70 + 20 + 40), 0.03125);
  // Once more.
  const Schedule again = there.Resumed(SavedAt(slower, 100), 100, {0, 30 - 4 * 40});
  for (int64_t step = 100; step < 200; ++step) {
    EXPECT_EQ(again.Factor(step), slower.Factor(step)) << step;
  }
}

// 800 examples in batches of 10, on 4 ranks and then on 2, which do not come to the last epoch.
TEST(ScheduleTest, MaxStepsDoesNotMoveDecays) {
  for (const std::string name : {"step", "multistep"}) {
    ScheduleOptions options = {.name = name, .gamma = 0.5};
    if (name == "multistep") options.milestones = {2, 6, 9};
    const Schedule first = Make(options, {.epochs = 10, .steps_per_epoch = 20, .max_steps = 150});
    const Schedule second = Make(options, {.epochs = 10, .steps_per_epoch = 40, .max_steps = 150})
                                .Resumed(SavedAt(first, 100), 100, {50, 200});
    EXPECT_EQ(second.pace().time_per_step, 0.5);
    EXPECT_EQ(second.Factor(139), first.Factor(119));
    EXPECT_EQ(second.Factor(140), first.Factor(120));
    EXPECT_NE(second.Factor(140), second.Factor(139));
    const Schedule same = first.Resumed(SavedAt(first, 100), 100, {50, 100});
    for (int64_t step = 100; step < 150; ++step) {
      EXPECT_EQ(same.Factor(step), first.Factor(step)) << step;
    }
  }
}

TEST(ScheduleTest, WarmUpByEpochsAndSamplesIsRoundedUpToSteps) {
  const RunLength length = {.epochs = 4, .steps_per_epoch = 20, .samples_per_step = 96};
  for (const auto& [epochs, samples, steps] : std::vector<std::tuple<double, int64_t, int64_t>>{
           {0.5, 0, 10}, {0.01, 0, 1}, {0.06, 0, 2}, {0, 96, 1}, {0, 97, 2}, {0, 960, 10}}) {
    const Schedule schedule =
        Make({.name = "cosine", .warmup_epochs = epochs, .warmup_samples = samples}, length);
    const Schedule by_steps = Make({.name = "cosine", .warmup_steps = steps}, length);
    EXPECT_EQ(schedule.warmup(), steps) << epochs << " " << samples;
    for (int64_t step = 0; step <= 80; ++step) {
      EXPECT_EQ(schedule.Factor(step), by_steps.Factor(step)) << step;
    }
    // In another world it ends after as many examples.
    const RunLength there = {.epochs = 4, .steps_per_epoch = 40, .samples_per_step = 48};
    const Schedule resumed =
        Make({.name = "cosine", .warmup_epochs = epochs, .warmup_samples = samples}, there)
            .Resumed(SavedAt(schedule, 0), 0, 160);
    EXPECT_EQ(resumed.warmup(), steps);
    EXPECT_NEAR(resumed.Factor(2 * steps), 1, 1e-12);
  }
}

TEST(ScheduleTest, WarmUpLeadsToTheFirstFactor) {
  const Schedule schedule = Make({.name = "linear", .warmup_steps = 4, .start_factor = 0.5},
                                 {.epochs = 1, .steps_per_epoch = 20});
  EXPECT_DOUBLE_EQ(schedule.Factor(0), 0.125);
  EXPECT_DOUBLE_EQ(schedule.Factor(3), 0.5);
  EXPECT_DOUBLE_EQ(schedule.Factor(4), 0.5);
}

// The file is what testdata/schedules.py prints; tests/interop compares them.
TEST(ScheduleTest, RatesAreThoseOfPython) {
  const auto path = Runfile("libtorch_ddp/ddp/trainer/testdata/schedules.txt");
  ASSERT_TRUE(path.ok()) << path.status();
  std::ifstream file(*path);
  int cases = 0;
  for (std::string line; std::getline(file, line);) {
    if (absl::StartsWith(line, "#")) continue;
    SCOPED_TRACE(line);
    const std::vector<std::string> halves = absl::StrSplit(line, " | ");
    ASSERT_EQ(halves.size(), 2);
    ScheduleOptions options;
    std::vector<double> metrics, expected;
    const auto numbers = [](const std::string& text, char separator, std::vector<double>& out) {
      for (const absl::string_view one : absl::StrSplit(text, separator)) {
        out.push_back(std::stod(std::string(one)));
      }
    };
    for (const absl::string_view option : absl::StrSplit(halves[0], ' ')) {
      const std::pair<std::string, std::string> parts =
          absl::StrSplit(option, absl::MaxSplits('=', 1));
      if (parts.first == "metrics") {
        numbers(parts.second, ',', metrics);
      } else {
        const absl::Status set = ListOptions(options).Set(parts.first, parts.second);
        ASSERT_TRUE(set.ok()) << set;
      }
    }
    numbers(halves[1], ' ', expected);
    ++cases;
    if (options.name == "plateau") {
      Plateau plateau(options.plateau);
      ASSERT_EQ(metrics.size(), expected.size());
      for (size_t i = 0; i < metrics.size(); ++i) {
        plateau.Add(metrics[i]);
        EXPECT_NEAR(plateau.Rate(0.5) / 0.5, expected[i], 1e-11) << i;
      }
      continue;
    }
    const auto schedule = Schedule::Create(options, {.epochs = 6, .steps_per_epoch = 5});
    ASSERT_TRUE(schedule.ok()) << schedule.status();
    ASSERT_EQ(expected.size(), 30);
    for (int64_t step = 0; step < 30; ++step) {
      EXPECT_NEAR(schedule->Factor(step), expected[step], 1e-11) << step;
    }
  }
  EXPECT_EQ(cases, 17);
}

TEST(ScheduleTest, ARunShorterThanACycleHasRates) {
  for (const int64_t steps : {1, 2, 3, 4}) {
    const Schedule schedule = Make({.name = "onecycle"}, {.epochs = 1, .steps_per_epoch = steps});
    for (int64_t step = 0; step <= steps; ++step) {
      EXPECT_GT(schedule.Factor(step), 0) << steps;
      EXPECT_LE(schedule.Factor(step), 1) << steps;
    }
    EXPECT_NEAR(schedule.Factor(steps), 1 / 25e4, 1e-12);
  }
}

TEST(ScheduleTest, MistakesAreNamed) {
  EXPECT_EQ(Schedule::Create({.name = "cosin"}, {}).status().message(),
            "name=cosin is none of constant, cosine, halving, linear, multistep, onecycle, "
            "plateau, polynomial, step");
  EXPECT_FALSE(Schedule::Create({.name = "constant", .warmup_steps = -1}, {}).ok());
  EXPECT_FALSE(Schedule::Create({.name = "step", .step_epochs = 0}, {}).ok());
  for (const auto& [options, message] : std::vector<std::pair<ScheduleOptions, std::string>>{
           {{.warmup_steps = 1, .warmup_epochs = 2},
            "warmup_epochs=2 is given beside warmup_steps: warm-up has one length"},
           {{.warmup_epochs = 2, .warmup_samples = 3},
            "warmup_samples=3 is given beside warmup_epochs: warm-up has one length"},
           {{.name = "multistep"},
            "milestones=[] must name the epochs of schedule multistep, as in 30,60"},
           {{.name = "step", .min_factor = 0.5},
            "min_factor=0.5 is no option of step, which has none"},
           {{.name = "cosine", .power = 2}, "power=2 is no option of cosine, which has min_factor"},
           {{.name = "cosine", .plateau = {.patience = 1}},
            "plateau.patience=1 is no option of cosine, which has min_factor"},
           {{.name = "plateau", .plateau = {.factor = 0}}, "plateau.factor=0 must be more than 0"},
           {{.name = "onecycle", .warmup_steps = 5},
            "name=onecycle rises by itself, for pct_start of the run, and takes no warm-up"}}) {
    const absl::Status refused = Schedule::Create(options, {}).status();
    EXPECT_TRUE(absl::StartsWith(refused.message(), message)) << refused;
  }
  EXPECT_TRUE(Schedule::Create({.name = "plateau", .plateau = {.patience = 1}}, {}).ok());
  // Configurations of runs have had them with any schedule.
  EXPECT_TRUE(Schedule::Create({.name = "cosine", .step_epochs = 2, .gamma = 0.5}, {}).ok());
  const LrLambda lambda = [](double, int64_t) { return 1; };
  EXPECT_TRUE(absl::StartsWith(Schedule::Create({.name = "cosine"}, {}, lambda).status().message(),
                               "name=cosine is given beside lr_lambda"));
}

TEST(ScheduleTest, WithoutEpochsNothingCountsThem) {
  EXPECT_TRUE(CheckWithoutEpochs({.name = "cosine", .warmup_steps = 2}).ok());
  for (const auto& [options, message] : std::vector<std::pair<ScheduleOptions, std::string>>{
           {{.warmup_epochs = 0.5}, "warmup_epochs=0.5 counts epochs, but the sampler of"},
           {{.name = "step"}, "name=step decays by epochs, but the sampler of"},
           {{.name = "multistep", .milestones = {2}}, "name=multistep decays by epochs"}}) {
    const absl::Status refused = CheckWithoutEpochs(options);
    EXPECT_TRUE(absl::StartsWith(refused.message(), message)) << refused;
  }
}

}  // namespace
}  // namespace ddp::trainer
