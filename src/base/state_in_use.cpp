#include "base/state_in_use.h"

#include <atomic>
#include <map>
#include <optional>
#include <utility>

#include "base/mutex.h"
#include "base/thread_annotations.h"

namespace lockstep {
namespace {

struct Use {
  std::optional<StateInUse> state;  ///< empty: kept before it was in use
  bool is_kept = false;
};

struct Uses {
  Mutex mutex;
  std::map<const void*, Use> known LOCKSTEP_GUARDED_BY(mutex);
  std::optional<StateInUse> giver LOCKSTEP_GUARDED_BY(mutex);  ///< of the last batch; empty: since the last backward
  bool any_optimizer LOCKSTEP_GUARDED_BY(mutex) = false;
  std::atomic<bool> any_backward{false};
  std::atomic<bool> any_giver{false};  ///< saves a backward the mutex

  /// Never destroyed: objects may outlive main().
  static Uses& get() {
    static auto* const kAll = new Uses;
    return *kAll;
  }

  void add(const StateInUse& state) LOCKSTEP_REQUIRES(mutex) {
    Use& use = known[state.object];
    if (use.state && use.state->life.expired()) use = {};  // of an earlier object at this address
    if (!use.state) use.state = state;
  }
};

}  // namespace

std::weak_ptr<const void> life_of_process() {
  static const auto* const kLife = new std::shared_ptr<const void>(std::make_shared<char>());
  return *kLife;
}

void note_in_use(const StateInUse& state) {
  Uses& all = Uses::get();
  const MutexLock lock(all.mutex);
  all.add(state);
}

void note_optimizer_in_use(const void* optimizer, std::weak_ptr<const void> life) {
  Uses& all = Uses::get();
  const MutexLock lock(all.mutex);
  all.any_optimizer = true;
  all.add({optimizer, std::move(life), "an optimizer that the training steps",
           "checkpointer.add(\"optimizer\", optimizer)"});
}

void note_batch_given(const StateInUse& loader) {
  Uses& all = Uses::get();
  const MutexLock lock(all.mutex);
  all.giver = loader;
  all.any_giver.store(true, std::memory_order_relaxed);
}

void note_backward() {
  Uses& all = Uses::get();
  all.any_backward.store(true, std::memory_order_relaxed);
  if (!all.any_giver.exchange(false, std::memory_order_relaxed)) return;
  const MutexLock lock(all.mutex);
  if (const auto giver = std::exchange(all.giver, std::nullopt)) all.add(*giver);
}

void note_kept(const void* object) {
  Uses& all = Uses::get();
  const MutexLock lock(all.mutex);
  all.known[object].is_kept = true;
}

void note_optimizer_kept(const void* optimizer) {
  Uses& all = Uses::get();
  const MutexLock lock(all.mutex);
  all.any_optimizer = true;
  all.known[optimizer].is_kept = true;
}

void note_gone(const void* object) {
  Uses& all = Uses::get();
  const MutexLock lock(all.mutex);
  all.known.erase(object);
}

std::vector<StateInUse> forgotten_states() {
  Uses& all = Uses::get();
  const MutexLock lock(all.mutex);
  std::vector<StateInUse> forgotten;
  for (const auto& [object, use] : all.known)
    if (use.state && !use.is_kept && !use.state->life.expired()) forgotten.push_back(*use.state);
  return forgotten;
}

bool optimizer_is_unknown() {
  Uses& all = Uses::get();
  const MutexLock lock(all.mutex);
  return all.any_backward.load(std::memory_order_relaxed) && !all.any_optimizer;
}

}  // namespace lockstep
