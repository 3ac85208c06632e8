#include "base/weights_set.h"

#include <atomic>
#include <unordered_set>

#include "base/mutex.h"
#include "base/shared_weights.h"

namespace lockstep {
namespace {

std::atomic<uint64_t> times{0}, times_loaded{0};

Mutex left_out_mutex;
OuterCopiesLeftOut left_out LOCKSTEP_GUARDED_BY(left_out_mutex);

Mutex borrowed_mutex;
std::unordered_multiset<const void*> borrowed LOCKSTEP_GUARDED_BY(borrowed_mutex);

}  // namespace

void note_weights_set(const std::vector<const void*>& storages, uint64_t values) {
  times.fetch_add(1, std::memory_order_relaxed);
  for (SharedWeights* weights : shared_weights_in(storages)) weights->were_set(storages, values);
}

void note_any_weights_set() {
  times.fetch_add(1, std::memory_order_relaxed);
  for (SharedWeights* weights : all_shared_weights()) weights->were_set({}, 0);
}

void note_weights_loaded(const std::vector<const void*>& storages, uint64_t values) {
  times_loaded.fetch_add(1, std::memory_order_relaxed);
  note_weights_set(storages, values);
}

uint64_t times_weights_were_loaded() { return times_loaded.load(std::memory_order_relaxed); }

uint64_t times_weights_were_set() { return times.load(std::memory_order_relaxed); }

void note_outer_copy_left_out(const std::string& name) {
  const MutexLock lock(left_out_mutex);
  left_out = {left_out.times + 1, name};
}

OuterCopiesLeftOut outer_copies_left_out() {
  const MutexLock lock(left_out_mutex);
  return left_out;
}

void note_borrowed(const std::vector<const void*>& storages) {
  const MutexLock lock(borrowed_mutex);
  borrowed.insert(storages.begin(), storages.end());
}

void note_given_back(const std::vector<const void*>& storages) {
  const MutexLock lock(borrowed_mutex);
  for (const void* storage : storages)
    if (const auto found = borrowed.find(storage); found != borrowed.end()) borrowed.erase(found);
}

bool any_borrowed() {
  const MutexLock lock(borrowed_mutex);
  return !borrowed.empty();
}

bool is_borrowed(const void* storage) {
  const MutexLock lock(borrowed_mutex);
  return borrowed.contains(storage);
}

}  // namespace lockstep
