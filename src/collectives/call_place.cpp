#include "collectives/call_place.h"

#include <utility>

#include "base/mutex.h"

namespace lockstep {
namespace {

struct Current {
  Mutex mutex;
  CallPlace::Call call LOCKSTEP_GUARDED_BY(mutex);
};

/// Never destroyed, because a model may outlive main().
Current& current() {
  static auto* const kCurrent = new Current;
  return *kCurrent;
}

}  // namespace

CallPlace::CallPlace(Call call) : before_(std::move(call)) {
  const MutexLock lock(current().mutex);
  std::swap(current().call, before_);
}

CallPlace::~CallPlace() {
  const MutexLock lock(current().mutex);
  std::swap(current().call, before_);
}

CallPlace::Now CallPlace::now() {
  const MutexLock lock(current().mutex);
  const Call& call = current().call;
  return {call.text, call.caller == nullptr ? Caller{} : *call.caller};
}

}  // namespace lockstep
