#pragma once

#include <lockstep/cxx20.h>

#include <list>
#include <memory>
#include <utility>

namespace lockstep {

/// The number of backward passes per reduction. Belongs to a Replica; guards change it between passes.
struct BackwardPasses {
  std::list<int> guards;      ///< the value of each guard that is alive; the last one counts
  int since_reduction = 0;    ///< passes whose gradients are in .grad, not yet reduced
  int counted = 0;            ///< of these, those outside no_sync(): what accumulate() counts
  int last_accumulation = 0;  ///< n of the last accumulate(n); 0: there was none
  /// 0: no pass reduces.
  int reduce_every() const { return guards.empty() ? 1 : guards.back(); }
  /// Whether the next pass reduces.
  bool reduces_next() const { return reduce_every() > 0 && counted + 1 >= reduce_every(); }
  void note_pass() {
    ++since_reduction;
    if (reduce_every() > 0) ++counted;
  }
  void note_reduction() { since_reduction = counted = 0; }
};

/// While it lives, backward passes keep gradients local: they accumulate into .grad on each rank, and the first
/// backward after it reduces them. All ranks must hold one during the same backward passes. If several exist, the
/// newest counts. A guard may be moved (into a std::optional, say); guards may end in any order and outlive the model.
class NoSyncGuard {
 public:
  explicit NoSyncGuard(std::shared_ptr<BackwardPasses> passes, int reduce_every = 0)
      : passes_(std::move(passes)), place_(passes_->guards.insert(passes_->guards.end(), reduce_every)) {}
  ~NoSyncGuard() { end(); }
  NoSyncGuard(NoSyncGuard&& other) noexcept : passes_(std::move(other.passes_)), place_(other.place_) {}
  NoSyncGuard& operator=(NoSyncGuard&& other) noexcept {
    if (this == &other) return *this;
    end();
    passes_ = std::move(other.passes_);
    place_ = other.place_;
    return *this;
  }

 protected:
  std::shared_ptr<BackwardPasses> passes_;  ///< null: moved from

 private:
  void end() {
    if (passes_) passes_->guards.erase(place_);
    passes_ = nullptr;
  }

  std::list<int>::iterator place_;
};

/// While it lives, only every n-th backward reduces gradients. Passes within no_sync() do not count.
class Accumulation : public NoSyncGuard {
 public:
  using NoSyncGuard::NoSyncGuard;
  /// Whether the last backward reduced, so that optimizer.step() and zero_grad() are due. False once moved from.
  bool complete() const { return passes_ && passes_->since_reduction == 0; }
};

}  // namespace lockstep
