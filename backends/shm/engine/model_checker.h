// For tests: a model checker, which explores all executions of a few threads on processors with a
// weak memory model.
//
//   enum { kData, kFlag };
//   Program writer = {Store(kData, 1, kRelaxed), Store(kFlag, 1, kRelease)};
//   Program reader = {Await(kFlag, 1, kAcquire), Expect(kData, 1)};
//   EXPECT_EQ(Explore({writer, reader}).violation, "");
//
// The model: one memory, initially zero. A thread performs its operations one at a time, in any
// order that the rules below allow, and the threads interleave in any way. So a store may be seen
// late (as from a store buffer), stores may be seen out of order, and a load may be performed
// early, before a preceding branch is decided. An operation waits for an earlier one of its thread
// if
//   - the earlier one acquires, or the later one releases,
//   - both are sequentially consistent, or one of them is a fence or a system call,
//   - both are on the same location,
//   - the later one changes memory, and whether it does depends on what the earlier one reads,
// and otherwise does not. This allows all executions of x86-64 (total store order) and AArch64 with
// the instructions for C++ atomics, including LDAPR for acquire, and more. Two limits: a load never
// takes its value from the thread's own store buffer, so a program must not read what it has just
// written; and a store reaches all other threads at once, which both architectures guarantee and
// POWER does not.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ddp::backends::shm::model {

constexpr int kMaxThreads = 3;
constexpr int kMaxLocations = 18;
constexpr int kMaxRegisters = 40;
constexpr int kMaxOperations = 64;

enum Order { kRelaxed, kAcquire, kRelease, kSequential };
enum class Kind { kLoad, kStore, kExchange, kAdd, kAwait, kFence, kSleep, kWake };

// Values that a thread has read, by register number; initially 0.
using Registers = std::array<int8_t, kMaxRegisters>;

// The condition under which an operation is executed, and the registers that it depends on.
struct Condition {
  std::vector<int> depends = {};
  std::function<bool(const Registers&)> holds = nullptr;  // null: always
};

struct Operation {
  Kind kind;
  int location = -1;
  int8_t value = 0;
  Order order = kRelaxed;
  int into = -1;        // register for what was read
  int sleep_on = -1;    // kSleep: the register with the value expected
  bool expect = false;  // what is read must be `value`
  Condition condition = {};
};
using Program = std::vector<Operation>;

inline Operation Load(int into, int location, Order order) {
  return {.kind = Kind::kLoad, .location = location, .order = order, .into = into};
}
// A relaxed load that must read `value`.
inline Operation Expect(int location, int value) {
  return {.kind = Kind::kLoad,
          .location = location,
          .value = static_cast<int8_t>(value),
          .expect = true};
}
inline Operation Store(int location, int value, Order order, Condition condition = {}) {
  return {.kind = Kind::kStore,
          .location = location,
          .value = static_cast<int8_t>(value),
          .order = order,
          .condition = std::move(condition)};
}
// Read-modify-write, sequentially consistent.
inline Operation Exchange(int into, int location, int value, Condition condition = {}) {
  return {.kind = Kind::kExchange,
          .location = location,
          .value = static_cast<int8_t>(value),
          .order = kSequential,
          .into = into,
          .condition = std::move(condition)};
}
inline Operation Increment(int location, Condition condition = {}) {
  return {.kind = Kind::kAdd,
          .location = location,
          .value = 1,
          .order = kSequential,
          .condition = std::move(condition)};
}
// Loads until the location holds at least `value`.
inline Operation Await(int location, int value, Order order) {
  return {.kind = Kind::kAwait,
          .location = location,
          .value = static_cast<int8_t>(value),
          .order = order};
}
inline Operation Fence() { return {.kind = Kind::kFence}; }
// FUTEX_WAIT: returns at once if the location differs from the register; otherwise sleeps until a
// Wake.
inline Operation Sleep(int location, int expected, Condition condition = {}) {
  return {.kind = Kind::kSleep,
          .location = location,
          .sleep_on = expected,
          .condition = std::move(condition)};
}
// FUTEX_WAKE, of all sleepers.
inline Operation Wake(int location, Condition condition = {}) {
  return {.kind = Kind::kWake, .location = location, .condition = std::move(condition)};
}

struct Result {
  std::string violation;  // empty: none; otherwise the steps of an execution with a violation
  size_t states = 0;      // number of different states that were reached
};

// Explores all executions of the programs, up to the first violation: an Expect that reads another
// value, or a deadlock of threads that sleep or await. Thread-compatible.
class Explorer {
 public:
  explicit Explorer(std::vector<Program> programs) : programs_(std::move(programs)) {
    for (const Program& program : programs_) {
      std::vector<uint64_t> before(program.size());
      for (size_t later = 0; later < program.size(); ++later) {
        for (size_t earlier = 0; earlier < later; ++earlier) {
          if (Ordered(program[earlier], program[later])) before[later] |= uint64_t{1} << earlier;
        }
      }
      before_.push_back(std::move(before));
    }
  }

  Result Run() {
    State start;
    std::memset(&start, 0, sizeof(start));
    start.asleep.fill(-1);
    Visit(start);
    return {violation_, seen_.size()};
  }

 private:
  // It has no padding, so that equal states are equal as bytes.
  struct State {
    std::array<uint64_t, kMaxThreads> performed;
    std::array<int8_t, kMaxLocations> memory;
    std::array<Registers, kMaxThreads> registers;
    std::array<int8_t, kMaxThreads> asleep;  // location, or -1
  };
  static_assert(std::is_trivially_copyable_v<State>);

  static bool Reads(const Operation& o) {
    return o.kind == Kind::kLoad || o.kind == Kind::kAwait || o.kind == Kind::kExchange ||
           o.kind == Kind::kAdd;
  }
  static bool Writes(const Operation& o) {
    return o.kind == Kind::kStore || o.kind == Kind::kExchange || o.kind == Kind::kAdd;
  }
  static bool OrdersAll(const Operation& o) {
    return o.kind == Kind::kFence || o.kind == Kind::kSleep || o.kind == Kind::kWake;
  }

  static bool Ordered(const Operation& earlier, const Operation& later) {
    if (OrdersAll(earlier) || OrdersAll(later)) return true;
    if (earlier.location == later.location) return true;
    if (earlier.order == kSequential && later.order == kSequential) return true;
    if (Reads(earlier) && (earlier.order == kAcquire || earlier.order == kSequential)) return true;
    if (Writes(later) && (later.order == kRelease || later.order == kSequential)) return true;
    if (!Writes(later)) return false;
    if (earlier.kind == Kind::kAwait) return true;
    for (int r : later.condition.depends) {
      if (r == earlier.into) return true;
    }
    return false;
  }

  // False once a violation is found. Recursion is as deep as all programs are long.
  bool Visit(const State& state) {
    if (!seen_.emplace(reinterpret_cast<const char*>(&state), sizeof(state)).second) return true;
    bool moved = false;
    bool finished = true;
    for (size_t t = 0; t < programs_.size(); ++t) {
      const Program& program = programs_[t];
      for (size_t i = 0; i < program.size(); ++i) {
        const uint64_t bit = uint64_t{1} << i;
        if ((state.performed[t] & bit) != 0) continue;
        finished = false;
        if (state.asleep[t] >= 0) break;
        if ((before_[t][i] & ~state.performed[t]) != 0) continue;
        if (program[i].kind == Kind::kAwait &&
            state.memory[program[i].location] < program[i].value) {
          continue;
        }
        moved = true;
        State next = state;
        next.performed[t] |= bit;
        // An operation without effect needs no interleaving with others.
        if (DoesNothing(program[i], state.registers[t])) return Visit(next);
        trace_.push_back(Describe(t, program[i]));
        if (!Perform(t, program[i], next) || !Visit(next)) return false;
        trace_.pop_back();
      }
      finished = finished && state.asleep[t] < 0;
    }
    if (moved || finished) return true;
    return Violation("deadlock: no thread can continue");
  }

  static bool DoesNothing(const Operation& o, const Registers& registers) {
    return o.kind == Kind::kFence ||
           (o.condition.holds != nullptr && !o.condition.holds(registers));
  }

  bool Perform(size_t t, const Operation& o, State& state) {
    int8_t* const cell = o.location >= 0 ? &state.memory[o.location] : nullptr;
    if (o.into >= 0) state.registers[t][o.into] = *cell;
    switch (o.kind) {
      case Kind::kLoad:
        if (o.expect && *cell != o.value) return Violation(absl::StrCat("it reads ", *cell));
        break;
      case Kind::kStore:
      case Kind::kExchange:
        *cell = o.value;
        break;
      case Kind::kAdd:
        *cell = static_cast<int8_t>(*cell + o.value);
        break;
      case Kind::kAwait:
      case Kind::kFence:
        break;
      case Kind::kSleep:
        if (*cell == state.registers[t][o.sleep_on]) {
          state.asleep[t] = static_cast<int8_t>(o.location);
        }
        break;
      case Kind::kWake:
        for (int8_t& on : state.asleep) {
          if (on == o.location) on = -1;
        }
        break;
    }
    return true;
  }

  bool Violation(const std::string& what) {
    violation_ = absl::StrCat(absl::StrJoin(trace_, "\n"), "\n", what);
    return false;
  }

  static std::string Describe(size_t t, const Operation& o) {
    constexpr const char* kNames[] = {"load",  "store", "exchange", "add",
                                      "await", "fence", "sleep",    "wake"};
    std::string text =
        absl::StrCat("thread ", t, ": ", kNames[static_cast<int>(o.kind)], " [", o.location, "]");
    if (o.kind == Kind::kAwait || Writes(o)) absl::StrAppend(&text, " ", o.value);
    return text;
  }

  const std::vector<Program> programs_;
  std::vector<std::vector<uint64_t>> before_;  // of each operation: those it waits for
  std::unordered_set<std::string> seen_;
  std::vector<std::string> trace_;
  std::string violation_;
};

inline Result Explore(std::vector<Program> programs) { return Explorer(std::move(programs)).Run(); }

}  // namespace ddp::backends::shm::model
