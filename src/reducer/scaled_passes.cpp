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
  std::vector<ScaledPasses*> list LOCKSTEP_GUARDED_BY(mutex);
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
  return std::any_of(list.begin(), list.end(), [&](const auto* one) { return one->knows(backward); });
}

bool ScaledPasses::add(int backward, const WayToResult& way, float scale) {
  bool is_new;
  {
    const MutexLock lock(mutex_);
    is_new = !passes_.contains(backward);
    if (is_new && passes_.size() == kMostScaledPasses) passes_.erase(passes_.begin());
    Pass& pass = passes_[backward];
    pass.update = updates_;
    if (way.beside) pass.beside = way.beside;
    if (!way.nonlinear.empty()) wrong_.nonlinear = way.nonlinear;
    if (scale != scale_) wrong_.stale = scale;
    if (is_new) ++count_;
  }
  if (!is_new || alive.load(std::memory_order_relaxed) < 2) return is_new;
  const MutexLock lock(all_scaled_passes().mutex);
  for (ScaledPasses* other : all_scaled_passes().list)
    if (other != this && other->knows(backward)) {
      other->note_two();
      note_two();
    }
  return is_new;
}

bool ScaledPasses::knows(int backward) const { return scale_of(backward) != Scale::kNone; }

void ScaledPasses::note_two() {
  const MutexLock lock(mutex_);
  wrong_.is_of_two = true;
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

ScaledPasses::Wrong ScaledPasses::take_wrong() {
  const MutexLock lock(mutex_);
  return std::exchange(wrong_, {});
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
