#include "fully_sharded/model_call.h"

#include <utility>

#include "base/mutex.h"

namespace lockstep::fully_sharded {
namespace {

struct Current {
  Mutex mutex;
  std::string text LOCKSTEP_GUARDED_BY(mutex);
};

/// Never destroyed: a model may go after main().
Current& now() {
  static auto* const kNow = new Current;
  return *kNow;
}

}  // namespace

ModelCall::ModelCall(std::string text) : before_(std::move(text)) {
  const MutexLock lock(now().mutex);
  std::swap(now().text, before_);
}

ModelCall::~ModelCall() {
  const MutexLock lock(now().mutex);
  std::swap(now().text, before_);
}

std::string ModelCall::current() {
  const MutexLock lock(now().mutex);
  return now().text;
}

}  // namespace lockstep::fully_sharded
