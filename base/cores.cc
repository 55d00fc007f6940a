#include "base/cores.h"

#include <sched.h>

#include <algorithm>
#include <thread>

namespace ddp {

int AvailableCores() {
  cpu_set_t cores;
  if (::sched_getaffinity(0, sizeof(cores), &cores) == 0) return std::max(1, CPU_COUNT(&cores));
  // A machine of more cores than cpu_set_t has room for.
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace ddp
