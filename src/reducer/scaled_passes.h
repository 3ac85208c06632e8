#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "base/mutex.h"
#include "reducer/gradient_marks.h"

namespace lockstep {

/// The backward passes that went through a loss which one GradScaler has scaled. Any thread may call it.
class ScaledPasses {
 public:
  ScaledPasses();
  ~ScaledPasses();
  ScaledPasses(const ScaledPasses&) = delete;
  ScaledPasses& operator=(const ScaledPasses&) = delete;

  /// Whether there is such an object in this process, so that somebody will ask for the passes.
  static bool any();
  /// Whether one of these objects knows the pass.
  static bool known_to_any(int backward);

  /// `beside`: what a part of the loss reached that was added after scale(); null: nothing.
  void add(int backward, std::shared_ptr<const TensorSet> beside);
  /// The scale changes: passes so far have the earlier one.
  void update();

  enum class Scale { kPresent, kEarlier, kNone };
  Scale scale_of(int backward) const;
  /// Whether an unscaled part of that pass's loss reached one of these.
  bool reached_beside(int backward, const TensorSet& parameters) const;

 private:
  struct Pass {
    uint64_t update;
    std::shared_ptr<const TensorSet> beside;
  };

  mutable Mutex mutex_;
  std::map<int, Pass> passes_ LOCKSTEP_GUARDED_BY(mutex_);  ///< by current_backward()
  uint64_t updates_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
};

}  // namespace lockstep
