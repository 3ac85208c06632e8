#include "diloco/claim.h"

#include <set>

#include "base/mutex.h"

namespace lockstep::diloco {
namespace {

struct Claimed {
  Mutex mutex;
  std::set<const void*> models LOCKSTEP_GUARDED_BY(mutex);
};

Claimed& claimed() {
  static auto* const all = new Claimed;  // NOLINT: objects that end with the process may still use it
  return *all;
}

}  // namespace

Claim::Claim(const void* model) : model_(model) {
  Claimed& all = claimed();
  const MutexLock lock(all.mutex);
  all.models.insert(model);
}

Claim::~Claim() {
  Claimed& all = claimed();
  const MutexLock lock(all.mutex);
  all.models.erase(model_);
}

bool Claim::exists(const void* model) {
  Claimed& all = claimed();
  const MutexLock lock(all.mutex);
  return all.models.contains(model);
}

}  // namespace lockstep::diloco
