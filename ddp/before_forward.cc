#include "ddp/before_forward.h"

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

namespace ddp {
namespace {

struct Registered {
  std::atomic<int> count = 0;  // most programs have none
  std::mutex mutex;
  std::vector<const BeforeForward*> objects;
};

Registered& All() {
  static auto* all = new Registered();
  return *all;
}

}  // namespace

BeforeForward::BeforeForward(const c10d::ProcessGroup* group, std::function<void()> callback)
    : group_(group), callback_(std::move(callback)) {
  const std::lock_guard<std::mutex> lock(All().mutex);
  All().objects.push_back(this);
  ++All().count;
}

BeforeForward::~BeforeForward() {
  const std::lock_guard<std::mutex> lock(All().mutex);
  std::erase(All().objects, this);
  --All().count;
}

void BeforeForward::Run(const c10d::ProcessGroup* group) {
  if (All().count == 0) return;
  std::vector<const BeforeForward*> of_group;
  {
    const std::lock_guard<std::mutex> lock(All().mutex);
    for (const BeforeForward* object : All().objects) {
      if (object->group_ == group) of_group.push_back(object);
    }
  }
  // Without the lock: they may wait for other ranks, which may be threads of this process.
  for (const BeforeForward* object : of_group) object->callback_();
}

}  // namespace ddp
