#include "base/data_passes.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <utility>

#include "base/hash.h"
#include "base/mutex.h"

namespace lockstep {
namespace {

constexpr size_t kKept = 16;

struct Noted {
  Mutex mutex;
  std::deque<DataPass> newest LOCKSTEP_GUARDED_BY(mutex);
  std::atomic<uint64_t> count{0};
};

/// Never destroyed, because the program's static destructors may still use it.
Noted& noted() {
  static auto* const kNoted = new Noted;
  return *kNoted;
}

}  // namespace

void note_pass(DataPass pass) {
  if (pass.world_size == 1) return;
  Noted& all = noted();
  const MutexLock lock(all.mutex);
  all.newest.push_back(std::move(pass));
  if (all.newest.size() > kKept) all.newest.pop_front();
  ++all.count;
}

uint64_t passes_noted() { return noted().count.load(std::memory_order_relaxed); }

NewPasses passes_since(uint64_t& seen) {
  NewPasses passes;
  if (seen == passes_noted()) return passes;
  Noted& all = noted();
  const MutexLock lock(all.mutex);
  const uint64_t now = all.count, fresh = now - std::exchange(seen, now);
  passes.cut = fresh > all.newest.size();
  const auto count = static_cast<std::ptrdiff_t>(std::min<uint64_t>(fresh, all.newest.size()));
  passes.list.assign(all.newest.end() - count, all.newest.end());
  return passes;
}

uint64_t hash_of(const NewPasses& passes) {
  if (passes.list.empty()) return 0;
  Hash hash;
  for (const DataPass& pass : passes.list)
    for (const std::string& fact : pass.facts) hash.add(fact);
  return hash.value() | 1;
}

}  // namespace lockstep
