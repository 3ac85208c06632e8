#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "base/mutex.h"
#include "reducer/followed_result.h"
#include "reducer/gradient_marks.h"

namespace lockstep {

/// The backward passes through losses that one GradScaler has scaled. Any thread may call it.
class ScaledPasses {
 public:
  explicit ScaledPasses(float scale) : ScaledPasses() { scale_ = scale; }
  ~ScaledPasses();
  ScaledPasses(const ScaledPasses&) = delete;
  ScaledPasses& operator=(const ScaledPasses&) = delete;

  /// Whether there is such an object in this process, so that the passes will be needed.
  static bool any();
  /// Whether one of these objects knows the pass.
  static bool known_to_any(int backward);

  /// `way` is what happened to the loss after scale(), `scale` the loss's. Returns whether the pass is new.
  bool add(int backward, const WayToResult& way, float scale);
  /// Tells that a step has ended: passes so far have an earlier scale.
  void update(float scale);
  /// Sets a new scale; the passes since the last step keep theirs.
  void set_scale(float scale);
  uint64_t count() const;
  uint64_t count_since_update() const;
  /// Errors of passes.
  struct Wrong {
    std::optional<float> stale;  ///< the scale of a loss whose pass began after the scale had changed
    std::string nonlinear;       ///< WayToResult::nonlinear
    bool is_of_two = false;      ///< another such object has the same pass
  };
  /// The errors since the last call.
  Wrong take_wrong();

  enum class Scale { kPresent, kEarlier, kNone };
  Scale scale_of(int backward) const;
  /// Whether an unscaled part of that pass's loss reached one of these.
  bool reached_beside(int backward, const TensorSet& parameters) const;

 private:
  ScaledPasses();
  bool knows(int backward) const;
  void note_two();

  struct Pass {
    uint64_t update;
    std::shared_ptr<const TensorSet> beside;
  };

  mutable Mutex mutex_;
  std::map<int, Pass> passes_ LOCKSTEP_GUARDED_BY(mutex_);  ///< by current_backward()
  uint64_t updates_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  uint64_t count_ LOCKSTEP_GUARDED_BY(mutex_) = 0, count_at_update_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  float scale_ LOCKSTEP_GUARDED_BY(mutex_) = 1;
  Wrong wrong_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep
