#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "train_c/guarded.h"

namespace lockstep::train_c {

/// A number that no handle has had.
uintptr_t next_handle();

/// The objects behind the handles of one type. A handle is a number cast to a pointer. Numbers are never reused, so a
/// handle that has been freed, of another type, or made up, is refused.
template <typename Thing, typename Handle>
class Handles {
 public:
  /// `what` names the type in texts.
  explicit Handles(const char* what) : what_(what) {}

  Handle* add(std::shared_ptr<Thing> thing) {
    const uintptr_t number = next_handle();
    const MutexLock lock(mutex_);
    things_.emplace(number, std::move(thing));
    return reinterpret_cast<Handle*>(number);
  }
  std::shared_ptr<Thing> find(const char* function, const Handle* handle) {
    std::shared_ptr<Thing> thing = find_or_null(handle);
    if (!thing)
      refuse(function, handle == nullptr ? "the " + what_ + " is null"
                                         : "this is not a " + what_ + ", or it has already been freed or left");
    return thing;
  }
  std::shared_ptr<Thing> find_or_null(const Handle* handle) {
    const MutexLock lock(mutex_);
    const auto found = things_.find(reinterpret_cast<uintptr_t>(handle));
    return found == things_.end() ? nullptr : found->second;
  }
  /// The thing, if there is only one.
  std::shared_ptr<Thing> only() {
    const MutexLock lock(mutex_);
    return things_.size() == 1 ? things_.begin()->second : nullptr;
  }
  void remove(const Handle* handle) {
    std::shared_ptr<Thing> removed;  // destroyed without the lock
    const MutexLock lock(mutex_);
    const auto found = things_.find(reinterpret_cast<uintptr_t>(handle));
    if (found == things_.end()) return;
    removed = std::move(found->second);
    things_.erase(found);
  }
  /// Removes all things of a world.
  template <typename World>
  void remove_all_of(const World& world) {
    std::vector<std::shared_ptr<Thing>> removed;
    const MutexLock lock(mutex_);
    for (auto entry = things_.begin(); entry != things_.end();) {
      if (entry->second->world == world) {
        removed.push_back(std::move(entry->second));
        entry = things_.erase(entry);
      } else {
        ++entry;
      }
    }
  }

 private:
  const std::string what_;
  Mutex mutex_;
  std::unordered_map<uintptr_t, std::shared_ptr<Thing>> things_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::train_c
