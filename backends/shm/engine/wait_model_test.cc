// The two protocols that everything in shm rests on, run in every order that processors allow:
// sleeping (signals.h) and the mailbox with two lines by parity. Each is also weakened in every way
// that matters, which must show: a checker that finds nothing proves nothing.
#include <cstdio>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "backends/shm/engine/model_checker.h"
#include "gtest/gtest.h"

namespace ddp::backends::shm {
namespace {

using model::Await;
using model::Condition;
using model::Exchange;
using model::Expect;
using model::Explore;
using model::Fence;
using model::Increment;
using model::kAcquire;
using model::kRelaxed;
using model::kRelease;
using model::kSequential;
using model::Load;
using model::Operation;
using model::Order;
using model::Program;
using model::Registers;
using model::Result;
using model::Sleep;
using model::Store;
using model::Wake;

void Append(Program& program, Program more) {
  program.insert(program.end(), std::make_move_iterator(more.begin()),
                 std::make_move_iterator(more.end()));
}

// Sleeping.

// How strong each step is. The defaults are those of Publish: all sequentially consistent, no
// fences.
struct Strength {
  Order word_store = kSequential;
  bool publisher_fence = false;
  Order sleeping_load = kSequential;
  bool bell_before_last_look = true;
  Order sleeping_store = kSequential;
  bool waiter_fence = false;
  Order word_load = kSequential;
  bool rings = true;  // the doorbell changes before the wake
};

// Locations: a word that each rank publishes, and what others use to wake it.
int Word(int rank) { return rank; }
int Sleeping(int rank) { return 3 + rank; }
int Doorbell(int rank) { return 6 + rank; }

// Registers of one thread, handed out as its program grows.
class Names {
 public:
  int Next() { return next_++; }

 private:
  int next_ = 0;
};

// Signals::Publish.
Program Publish(int rank, int value, const std::vector<int>& to, const Strength& strength,
                Names& names) {
  Program program = {Store(Word(rank), value, strength.word_store)};
  if (strength.publisher_fence) program.push_back(Fence());
  for (int peer : to) {
    const int sleeping = names.Next();
    const int was = names.Next();
    const Condition asleep = {{sleeping}, [sleeping](const Registers& r) { return r[sleeping]; }};
    // It was not another publisher that rang.
    const Condition mine = {{sleeping, was}, [sleeping, was](const Registers& r) {
                              return r[sleeping] != 0 && r[was] != 0;
                            }};
    program.push_back(Load(sleeping, Sleeping(peer), strength.sleeping_load));
    program.push_back(Exchange(was, Sleeping(peer), 0, asleep));
    if (strength.rings) program.push_back(Increment(Doorbell(peer), mine));
    program.push_back(Wake(Doorbell(peer), mine));
  }
  return program;
}

// Engine::Drive without the time limit that would hide a lost wake-up: looks, sleeps, looks again.
// A ring ends at most two sleeps, one by the doorbell's value and one by the wake.
Program WaitFor(int rank, const std::vector<int>& from, int value, int rings,
                const Strength& strength, Names& names) {
  Program program;
  std::vector<std::vector<int>> looks;  // registers with what was seen, look by look
  const auto satisfied = [value](const Registers& r, const std::vector<int>& look) {
    for (int word : look) {
      if (r[word] < value) return false;
    }
    return true;
  };
  // True while no look, up to the last one so far, has seen all.
  const auto unsatisfied = [&looks, satisfied] {
    Condition condition;
    for (const auto& look : looks) {
      condition.depends.insert(condition.depends.end(), look.begin(), look.end());
    }
    condition.holds = [looks, satisfied](const Registers& r) {
      for (const auto& look : looks) {
        if (satisfied(r, look)) return false;
      }
      return true;
    };
    return condition;
  };
  for (int attempt = 0; attempt <= 2 * rings; ++attempt) {
    const Condition awake = unsatisfied();
    const int bell = names.Next();
    const Operation load_bell = Load(bell, Doorbell(rank), kSequential);
    if (strength.bell_before_last_look) program.push_back(load_bell);
    program.push_back(Store(Sleeping(rank), 1, strength.sleeping_store, awake));
    if (strength.waiter_fence) program.push_back(Fence());
    std::vector<int> look;
    for (int peer : from) {
      look.push_back(names.Next());
      program.push_back(Load(look.back(), Word(peer), strength.word_load));
    }
    looks.push_back(look);
    if (!strength.bell_before_last_look) program.push_back(load_bell);
    program.push_back(Sleep(Doorbell(rank), bell, unsatisfied()));
    program.push_back(Store(Sleeping(rank), 0, kRelaxed, awake));
  }
  // A rank that is not satisfied by now is stuck, which the checker reports.
  const int never = 11;
  const int zero = names.Next();
  program.push_back(Load(zero, never, kRelaxed));
  program.push_back(Sleep(never, zero, unsatisfied()));
  return program;
}

Result OnePublisher(const Strength& strength) {
  Names publisher, waiter;
  Program publishes = Publish(1, 1, {0}, strength, publisher);
  Append(publishes, Publish(1, 2, {0}, strength, publisher));
  return Explore({WaitFor(0, {1}, 2, 2, strength, waiter), publishes});
}

Result TwoPublishers(const Strength& strength) {
  Names waiter, one, two;
  return Explore({WaitFor(0, {1, 2}, 1, 2, strength, waiter), Publish(1, 1, {0}, strength, one),
                  Publish(2, 1, {0}, strength, two)});
}

Result TwoWaiters(const Strength& strength) {
  Names publisher, one, two;
  return Explore({Publish(0, 1, {1, 2}, strength, publisher), WaitFor(1, {0}, 1, 1, strength, one),
                  WaitFor(2, {0}, 1, 1, strength, two)});
}

// Each of two ranks publishes, then waits for the other: a barrier.
Result Barrier(const Strength& strength) {
  std::vector<Program> programs;
  for (int rank : {0, 1}) {
    Names names;
    Program program = Publish(rank, 1, {1 - rank}, strength, names);
    Append(program, WaitFor(rank, {1 - rank}, 1, 1, strength, names));
    programs.push_back(std::move(program));
  }
  return Explore(std::move(programs));
}

const struct {
  const char* name;
  Result (*run)(const Strength&);
} kScenes[] = {{"one publisher", &OnePublisher},
               {"two publishers", &TwoPublishers},
               {"two waiters", &TwoWaiters},
               {"barrier", &Barrier}};

void ExpectNoLostWakeUp(const Strength& strength) {
  for (const auto& scene : kScenes) {
    const Result result = scene.run(strength);
    EXPECT_EQ(result.violation, "") << scene.name;
    std::printf("%s: %zu states\n", scene.name, result.states);
  }
}

void ExpectLostWakeUp(const Strength& strength) {
  bool found = false;
  for (const auto& scene : kScenes) found = found || !scene.run(strength).violation.empty();
  EXPECT_TRUE(found);
}

TEST(SleepingModelTest, NoWakeUpIsLost) { ExpectNoLostWakeUp({}); }

// Signals::Store, then RingAll.
TEST(SleepingModelTest, NoWakeUpIsLostWithAFenceBetweenStoreAndRing) {
  ExpectNoLostWakeUp({.word_store = kRelease, .publisher_fence = true});
}

TEST(SleepingModelTest, NorWithFencesInTheirPlace) {
  ExpectNoLostWakeUp({.word_store = kRelease,
                      .publisher_fence = true,
                      .sleeping_load = kRelaxed,
                      .sleeping_store = kRelaxed,
                      .waiter_fence = true,
                      .word_load = kAcquire});
}

TEST(SleepingModelTest, EitherFenceIsNeeded) {
  ExpectLostWakeUp({.word_store = kRelease,
                    .publisher_fence = false,
                    .sleeping_load = kRelaxed,
                    .sleeping_store = kRelaxed,
                    .waiter_fence = true,
                    .word_load = kAcquire});
  ExpectLostWakeUp({.word_store = kRelease,
                    .publisher_fence = true,
                    .sleeping_load = kRelaxed,
                    .sleeping_store = kRelaxed,
                    .waiter_fence = false,
                    .word_load = kAcquire});
}

TEST(SleepingModelTest, EveryStepMustBeSequentiallyConsistent) {
  ExpectLostWakeUp({.word_store = kRelease});
  ExpectLostWakeUp({.sleeping_load = kAcquire});
  ExpectLostWakeUp({.sleeping_store = kRelease});
  ExpectLostWakeUp({.word_load = kAcquire});
}

TEST(SleepingModelTest, TheBellMustBeReadBeforeTheLastLook) {
  ExpectLostWakeUp({.bell_before_last_look = false});
}

TEST(SleepingModelTest, TheBellMustChangeBeforeTheWake) { ExpectLostWakeUp({.rings = false}); }

// Mailbox.

struct Mailbox {
  int lines = 2;  // per rank
  Order flag_store = kRelease;
  Order flag_load = kAcquire;
  bool waits_for_all = true;  // or for the next rank only
};

// In each round every rank fills its line, sets the line's flag to the round, waits for the flags
// of the others, and reads their lines.
Result RunMailbox(int ranks, int rounds, const Mailbox& mailbox) {
  const auto data = [](int rank, int line) { return rank * 4 + line * 2; };
  const auto flag = [](int rank, int line) { return rank * 4 + line * 2 + 1; };
  std::vector<Program> programs;
  for (int rank = 0; rank < ranks; ++rank) {
    Program program;
    for (int round = 1; round <= rounds; ++round) {
      const int line = round % mailbox.lines;
      program.push_back(Store(data(rank, line), round, kRelaxed));
      program.push_back(Store(flag(rank, line), round, mailbox.flag_store));
      const int others = mailbox.waits_for_all ? ranks - 1 : 1;
      for (int next = 1; next <= others; ++next) {
        const int peer = (rank + next) % ranks;
        program.push_back(Await(flag(peer, line), round, mailbox.flag_load));
        program.push_back(Expect(data(peer, line), round));
      }
    }
    programs.push_back(std::move(program));
  }
  return Explore(std::move(programs));
}

TEST(MailboxModelTest, NobodyReadsAnotherRound) {
  for (int ranks : {2, 3}) {
    const Result result = RunMailbox(ranks, 5, {});
    EXPECT_EQ(result.violation, "");
    std::printf("%d ranks: %zu states\n", ranks, result.states);
  }
}

TEST(MailboxModelTest, OneLineIsTooFew) {
  EXPECT_NE(RunMailbox(2, 5, {.lines = 1}).violation, "");
  EXPECT_NE(RunMailbox(3, 5, {.lines = 1}).violation, "");
}

TEST(MailboxModelTest, TheFlagMustReleaseAndAcquire) {
  EXPECT_NE(RunMailbox(2, 5, {.flag_store = kRelaxed}).violation, "");
  EXPECT_NE(RunMailbox(2, 5, {.flag_load = kRelaxed}).violation, "");
}

// Why one-sided patterns need acknowledgements: parity rests on everybody waiting for everybody.
TEST(MailboxModelTest, ParityNeedsEverybodyToWaitForEverybody) {
  EXPECT_NE(RunMailbox(3, 5, {.waits_for_all = false}).violation, "");
}

}  // namespace
}  // namespace ddp::backends::shm
