#include "collectives/gloo/word_at_exit.h"

#include <cstdlib>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/thread_token.h"

namespace lockstep::gloo_engine {
namespace {

/// Never destroyed.
struct Recorders {
  Mutex mutex;
  std::vector<std::pair<std::weak_ptr<FlightRecorder>, const void*>> known LOCKSTEP_GUARDED_BY(mutex);  ///< and thread

  static Recorders& get() {
    static auto* const kAll = new Recorders;
    return *kAll;
  }
};

void leave_all() {
  Recorders& all = Recorders::get();
  const MutexLock lock(all.mutex);
  for (const auto& [known, thread] : all.known)
    if (const auto recorder = known.lock(); recorder && thread == thread_token()) recorder->leave_word();
}

}  // namespace

void leave_word_at_exit(const std::shared_ptr<FlightRecorder>& recorder) {
  [[maybe_unused]] static const bool kRegistered = std::atexit(leave_all) == 0;
  Recorders& all = Recorders::get();
  const MutexLock lock(all.mutex);
  std::erase_if(all.known, [](const auto& known) { return known.first.expired(); });
  all.known.emplace_back(recorder, thread_token());
}

}  // namespace lockstep::gloo_engine
