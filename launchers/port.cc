#include "launchers/port.h"

namespace ddp::launchers {

int PortFromJob(uint64_t job, uint64_t step) {
  // 101 is coprime to kPorts, and 100 steps of a job do not collide with those of the next jobs.
  return kFirstPort + static_cast<int>((job % kPorts * 101 + step % kPorts) % kPorts);
}

int PortFromName(absl::string_view name) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a, 64 bits
  for (unsigned char c : name) hash = (hash ^ c) * 1099511628211u;
  return kFirstPort + static_cast<int>(hash % kPorts);
}

}  // namespace ddp::launchers
