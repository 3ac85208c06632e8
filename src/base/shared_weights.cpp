#include "base/shared_weights.h"

#include <algorithm>
#include <utility>

#include "base/mutex.h"

namespace lockstep {
namespace {

struct Known {
  SharedWeights* weights;
  std::vector<const void*> storages;
};

Mutex mutex;
std::vector<Known> known LOCKSTEP_GUARDED_BY(mutex);

}  // namespace

SharedWeights::Entry::Entry(SharedWeights& weights, std::vector<const void*> storages) : weights_(&weights) {
  const MutexLock lock(mutex);
  known.push_back({&weights, std::move(storages)});
}

SharedWeights::Entry::~Entry() {
  const MutexLock lock(mutex);
  std::erase_if(known, [this](const Known& one) { return one.weights == weights_; });
}

std::vector<SharedWeights*> shared_weights_in(const std::vector<const void*>& storages) {
  const MutexLock lock(mutex);
  std::vector<SharedWeights*> found;
  for (const Known& one : known)
    if (std::find_first_of(storages.begin(), storages.end(), one.storages.begin(), one.storages.end()) !=
        storages.end())
      found.push_back(one.weights);
  return found;
}

std::vector<SharedWeights*> all_shared_weights() {
  const MutexLock lock(mutex);
  std::vector<SharedWeights*> all;
  for (const Known& one : known) all.push_back(one.weights);
  return all;
}

std::string trouble_of(const std::vector<SharedWeights*>& all) {
  for (const SharedWeights* one : all)
    if (std::string trouble = one->trouble(); !trouble.empty()) return trouble;
  return "";
}

}  // namespace lockstep
