// Finds out from all ranks' reports why a collective is slow or has failed. Pure functions of
// values.
//
//   Diagnosis diagnosis = Diagnose({.rank = 0, .reports = reports, .dead = {2}}, /*number=*/17,
//                                  Symptom::kFailed);
//   diagnosis.text;   // "rank 2 has died (process 4711); it was last seen at #16 barrier"
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "backends/watch/report.h"

namespace ddp::backends::watch {

// One rank's view of its group.
struct GroupStatus {
  int rank = 0;                                         // the rank that knows it
  std::vector<std::optional<RankReport>> reports = {};  // by rank; none: nothing published yet
  std::set<int> dead = {};                              // their processes have ended
  // Have not answered the status request and are not known to be dead: on another host, or stopped.
  std::set<int> unresponsive = {};
};

struct Diagnosis {
  // Most severe first. Up to kWaitForEachOther, the collective can never complete.
  enum class Kind {
    kMismatch,
    kDead,
    kLeft,
    kAborted,
    kWaitForEachOther,
    kUnresponsive,
    kFailed,
    kMissing,
    kNothing
  };
  Kind kind = Kind::kNothing;
  std::string text;

  bool fatal() const { return kind <= Kind::kWaitForEachOther; }
};

// kOutside: the training thread waits in a Coordinator call; only kWaitForEachOther is looked for.
enum class Symptom { kSlow, kFailed, kOutside };

// Says why collective `number` is slow or has failed on rank `status.rank`. Number 0: no collective
// in particular. kNothing with a text: all ranks have called it.
Diagnosis Diagnose(const GroupStatus& status, uint64_t number, Symptom symptom);

// Whether a rank's own calls are known to differ from those of another's report. Compares
// signatures only, and is cheap.
bool SignaturesDiffer(const Recorder& mine, const RankReport& theirs);

// "#17 allreduce(sum) float32 [1000]", or "#17" if the report does not have that call.
std::string CallText(const RankReport& report, uint64_t number);

}  // namespace ddp::backends::watch
