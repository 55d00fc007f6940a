// From what the ranks report to what is wrong: pure logic, on values.
//
//   Finding finding = Examine({.rank = 0, .reports = reports, .dead = {2}}, /*number=*/17,
//                             Question::kWhyFailed);
//   finding.text;   // "rank 2 has died (process 4711); it was last seen at #16 barrier"
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "backends/watch/report.h"

namespace ddp::backends::watch {

struct Picture {
  int rank = 0;                                     // who looks
  std::vector<std::optional<Report>> reports = {};  // by rank; none: it has told nothing yet
  std::set<int> dead = {};                          // whose processes have ended
  // Have not answered the alarm, and cannot be seen to be dead: on another host, or stopped.
  std::set<int> silent = {};
};

struct Finding {
  // Worst first. All down to kLeft mean that the collective can never be completed.
  enum class Kind { kMismatch, kDead, kLeft, kSilent, kFailed, kMissing, kNothing };
  Kind kind = Kind::kNothing;
  std::string text;

  bool hopeless() const { return kind <= Kind::kLeft; }
};

enum class Question { kWhySlow, kWhyFailed };

// Why collective `number` is slow or has failed on rank `picture.rank`; 0 stands for none of them
// in particular. kNothing with a text: all ranks have come to it.
Finding Examine(const Picture& picture, uint64_t number, Question question);

// Whether a rank's own calls and another's report rule each other out. Cheap: signatures only.
bool SignaturesDiffer(const Recorder& mine, const Report& theirs);

// "#17 allreduce(sum) float32 [1000]" out of the report, "#17" if it is too old for it.
std::string Describe(const Report& report, uint64_t number);

// "rank 1", "ranks 0, 2".
std::string RankList(const std::set<int>& ranks);

}  // namespace ddp::backends::watch
