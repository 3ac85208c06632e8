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

class LeftTrouble final : public SharedWeights {
 public:
  LeftTrouble(const std::vector<const void*>& storages, std::string trouble, std::function<bool()> are_there)
      : trouble_(std::move(trouble)), are_there_(std::move(are_there)), wrong_(storages), entry_(*this, storages) {}

  std::string trouble() const override {
    const MutexLock lock(mutex_);
    return wrong_.empty() || !are_there_() ? "" : trouble_;
  }
  void were_set(const std::vector<const void*>& storages, uint64_t /*values*/) override {
    const MutexLock lock(mutex_);
    std::erase_if(wrong_, [&](const void* one) {
      return storages.empty() || std::find(storages.begin(), storages.end(), one) != storages.end();
    });
  }
  void before_broadcast(int /*root*/) override {}

 private:
  const std::string trouble_;
  const std::function<bool()> are_there_;
  mutable Mutex mutex_;
  std::vector<const void*> wrong_ LOCKSTEP_GUARDED_BY(mutex_);
  const Entry entry_;
};

Mutex left_mutex;
std::vector<std::shared_ptr<const LeftTrouble>> left LOCKSTEP_GUARDED_BY(left_mutex);

}  // namespace

SharedWeights::Entry::Entry(SharedWeights& weights, std::vector<const void*> storages) : weights_(&weights) {
  const MutexLock lock(mutex);
  known.push_back({&weights, std::move(storages)});
}

SharedWeights::Entry::~Entry() {
  const MutexLock lock(mutex);
  std::erase_if(known, [this](const Known& one) { return one.weights == weights_; });
}

std::shared_ptr<const SharedWeights> leave_trouble(const std::vector<const void*>& storages, std::string trouble,
                                                   std::function<bool()> are_there) {
  auto one = std::make_shared<const LeftTrouble>(storages, std::move(trouble), std::move(are_there));
  const MutexLock lock(left_mutex);
  left.push_back(one);  // never freed: another thread may be asking it
  return one;
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
