#include "backends/hier/parts.h"

#include <algorithm>

#include "absl/log/absl_log.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/status.h"

namespace ddp::backends::hier {

std::string Part::Describe() const {
  std::string own, group;
  for (size_t i = 0; i < ranks.size(); ++i) {
    absl::StrAppend(&own, i == 0 ? "" : ", ", i);
    absl::StrAppend(&group, i == 0 ? "" : ", ", ranks[i]);
  }
  return absl::StrCat("its ", name, " part (", backend->getBackendName(),
                      own == group ? "" : absl::StrCat("; ranks ", own, " there are ranks ", group),
                      ")");
}

void Parts::Abort() {
  for (Part* part : {&local, &cross, &flat}) {
    if (!*part) continue;
    const absl::Status status = CatchStatus("", [&] { part->backend->abort(); });
    if (!status.ok()) {
      ABSL_LOG(WARNING) << "hier: aborting " << part->Describe() << ": " << status.message();
    }
  }
}

void InPart(const Part& part, absl::string_view doing, const std::function<void()>& f) {
  try {
    f();
  } catch (const std::exception& error) {
    throw PartError(absl::StrCat(doing, " in ", part.Describe(), ": ", ExceptionMessage(error)));
  }
}

void Await(const Part& part, absl::string_view doing, c10d::Work& work, absl::Time deadline) {
  InPart(part, doing, [&] { TORCH_CHECK(work.wait(Remaining(deadline)), "aborted"); });
}

std::chrono::milliseconds Remaining(absl::Time deadline) {
  // Rounded up, so that the deadline has passed when the wait is over.
  const absl::Duration left = std::max(deadline - absl::Now(), absl::Milliseconds(1));
  return absl::ToChronoMilliseconds(absl::Ceil(left, absl::Milliseconds(1)));
}

}  // namespace ddp::backends::hier
