#include "base/loop_begin.h"

#include <atomic>
#include <utility>

#include "base/mutex.h"
#include "base/thread_annotations.h"

namespace lockstep {
namespace {

struct Waiting {
  Mutex mutex;
  std::function<void()> action LOCKSTEP_GUARDED_BY(mutex);
  std::atomic<bool> any{false};  ///< makes the check a single load when no action waits
};

Waiting& waiting() {
  static Waiting one;
  return one;
}

std::function<void()> exchanged(std::function<void()> action) {
  Waiting& all = waiting();
  const MutexLock lock(all.mutex);
  all.any.store(action != nullptr, std::memory_order_relaxed);
  return std::exchange(all.action, std::move(action));
}

}  // namespace

void when_loop_begins(std::function<void()> action) { exchanged(std::move(action)); }

void loop_begins() {
  if (!waiting().any.load(std::memory_order_relaxed)) return;
  if (const auto action = exchanged(nullptr)) action();
}

}  // namespace lockstep
