#include "reducer/scaled_passes.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

namespace lockstep {
namespace {

/// As many as a PassRecord keeps.
constexpr size_t kMostScaledPasses = 1024;

std::atomic<int> alive{0};

struct All {
  Mutex mutex;
  std::vector<const ScaledPasses*> list LOCKSTEP_GUARDED_BY(mutex);
};

All& all_scaled_passes() {
  static auto* const kAll = new All;
  return *kAll;
}

}  // namespace

ScaledPasses::ScaledPasses() {
  ++alive;
  const MutexLock lock(all_scaled_passes().mutex);
  all_scaled_passes().list.push_back(this);
}

ScaledPasses::~ScaledPasses() {
  const MutexLock lock(all_scaled_passes().mutex);
  std::erase(all_scaled_passes().list, this);
  --alive;
}

bool ScaledPasses::any() { return alive.load(std::memory_order_relaxed) > 0; }

bool ScaledPasses::known_to_any(int backward) {
  const MutexLock lock(all_scaled_passes().mutex);
  const auto& list = all_scaled_passes().list;
  return std::any_of(list.begin(), list.end(),
                     [&](const auto* one) { return one->scale_of(backward) != Scale::kNone; });
}

bool ScaledPasses::add(int backward, std::shared_ptr<const TensorSet> beside, float scale) {
  const MutexLock lock(mutex_);
  const bool is_new = !passes_.contains(backward);
  if (is_new && passes_.size() == kMostScaledPasses) passes_.erase(passes_.begin());
  Pass& pass = passes_[backward];
  pass.update = updates_;
  if (beside) pass.beside = std::move(beside);
  if (scale != scale_) stale_ = scale;
  if (is_new) ++count_;
  return is_new;
}

void ScaledPasses::update(float scale) {
  const MutexLock lock(mutex_);
  ++updates_;
  count_at_update_ = count_;
  scale_ = scale;
}

void ScaledPasses::set_scale(float scale) {
  const MutexLock lock(mutex_);
  scale_ = scale;
}

uint64_t ScaledPasses::count() const {
  const MutexLock lock(mutex_);
  return count_;
}

uint64_t ScaledPasses::count_since_update() const {
  const MutexLock lock(mutex_);
  return count_ - count_at_update_;
}

std::optional<float> ScaledPasses::take_stale_scale() {
  const MutexLock lock(mutex_);
  return std::exchange(stale_, std::nullopt);
}

ScaledPasses::Scale ScaledPasses::scale_of(int backward) const {
  const MutexLock lock(mutex_);
  const auto found = passes_.find(backward);
  if (found == passes_.end()) return Scale::kNone;
  return found->second.update == updates_ ? Scale::kPresent : Scale::kEarlier;
}

bool ScaledPasses::reached_beside(int backward, const TensorSet& parameters) const {
  const MutexLock lock(mutex_);
  const auto found = passes_.find(backward);
  return found != passes_.end() && found->second.beside &&
         std::any_of(parameters.begin(), parameters.end(),
                     [&](const c10::TensorImpl* one) { return found->second.beside->contains(one); });
}

}  // namespace lockstep
