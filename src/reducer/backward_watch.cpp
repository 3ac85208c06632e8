#include <utility>

#include "base/mutex.h"
#include "reducer/gradient_hook.h"

namespace lockstep {
namespace {

struct Watches {
  Mutex mutex;
  std::vector<const BackwardWatch*> list LOCKSTEP_GUARDED_BY(mutex);
};

Watches& watches() {
  static auto* const kWatches = new Watches;
  return *kWatches;
}

}  // namespace

BackwardWatch::BackwardWatch(std::function<void()> look) : look_(std::move(look)) {
  watch_engine();
  Watches& all = watches();
  const MutexLock lock(all.mutex);
  all.list.push_back(this);
}

BackwardWatch::~BackwardWatch() {
  Watches& all = watches();
  const MutexLock lock(all.mutex);
  std::erase(all.list, this);
}

std::vector<const BackwardWatch*> BackwardWatch::of_this_thread() {
  std::vector<const BackwardWatch*> mine;
  Watches& all = watches();
  const MutexLock lock(all.mutex);
  for (const BackwardWatch* watch : all.list)
    if (watch->thread_ == std::this_thread::get_id()) mine.push_back(watch);
  return mine;
}

void BackwardWatch::begin() {
  for (const BackwardWatch* watch : of_this_thread()) watch->look_();
}

}  // namespace lockstep
