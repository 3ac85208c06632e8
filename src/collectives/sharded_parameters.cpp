#include "collectives/sharded_parameters.h"

#include <unordered_set>
#include <utility>

#include "base/mutex.h"

namespace lockstep {
namespace {

struct Sharded {
  Mutex mutex;
  std::unordered_multiset<const c10::TensorImpl*> all LOCKSTEP_GUARDED_BY(mutex);
};

/// Never destroyed, because the program's static destructors may still use it.
Sharded& sharded() {
  static auto* const kSharded = new Sharded;
  return *kSharded;
}

}  // namespace

ShardedParameters::ShardedParameters(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
  const MutexLock lock(sharded().mutex);
  for (const at::Tensor& parameter : parameters_) sharded().all.insert(parameter.unsafeGetTensorImpl());
}

ShardedParameters::~ShardedParameters() {
  const MutexLock lock(sharded().mutex);
  for (const at::Tensor& parameter : parameters_)
    sharded().all.erase(sharded().all.find(parameter.unsafeGetTensorImpl()));
}

bool is_sharded(const at::Tensor& parameter) {
  const MutexLock lock(sharded().mutex);
  return sharded().all.contains(parameter.unsafeGetTensorImpl());
}

}  // namespace lockstep
