#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// The reason why the gradient of `parameter`, originally with `elements` elements on `device`, cannot be reduced;
/// nullptr if it can.
const char* gradient_problem(const at::Tensor& parameter, int64_t elements, at::Device device);

/// The piece of `flat` at `offset`, with the parameter's shape and, if it is dense, its strides, so that autograd
/// accumulates into it without a copy. It shares memory with `flat` but is not an autograd view of it, because
/// Optimizer::zero_grad detaches gradients in place, which views refuse.
at::Tensor gradient_in(const at::Tensor& flat, int64_t offset, const at::Tensor& parameter);

/// The place of one parameter's gradient in a bucket. It is one cache line, because a thousand slots leave the cache
/// between two steps.
class alignas(64) GradientSlot {
 public:
  /// `flat` is the bucket's memory, in which the gradient begins at `offset`.
  GradientSlot(at::Tensor parameter, at::Tensor flat, int64_t offset);

  /// Its place in the bucket, with the parameter's shape and strides.
  const at::Tensor& gradient() const { return gradient_; }
  int64_t elements() const { return elements_; }
  bool is_filled() const { return filled_; }
  bool is_used() const { return used_; }
  /// Whether it was filled with the .grad that still lies in this place.
  bool is_current() const { return filled_ && parameter_.grad().is_same(gradient_); }
  /// The parameter's .grad if it lies in this bucket, else an undefined tensor.
  at::Tensor gradient_here() const;
  /// The reason why the parameter's gradient cannot be reduced; nullptr if it can.
  const char* problem() const { return gradient_problem(parameter_, elements_, flat_.device()); }

  /// Fetches into the cache what fill() will write, a few slots ahead of it.
  void prefetch() const {
    __builtin_prefetch(gradient_.unsafeGetTensorImpl(), /*write=*/1);
    if (small_place_ != nullptr) __builtin_prefetch(small_place_, /*write=*/1);
  }
  /// See Bucket::fill(), fill_sum() and fill_with_zeros().
  const char* fill(bool used, bool counts);
  void fill_sum(const at::Tensor* sum, bool used);
  void keep_unused();

  /// For sums: the result of an earlier reduction must count once, not once per rank. If .grad lies here and holds such
  /// a result, sets it to zero before this rank's next gradient is added.
  void forget_reduced();
  /// Moves .grad, if defined, into this place. `reduced`: it holds another bucket's reduced gradient.
  void adopt(bool reduced);
  /// Called before a reduction: later gradients must not be added to the data being reduced.
  void let_go_of_gradient();
  /// Moves a gradient that has arrived since out of .grad; undefined if there is none.
  at::Tensor set_aside_late();
  /// Called after a reduction: .grad becomes the reduced gradient if some rank `used` the parameter, else its previous
  /// value.
  void finish(bool used);
  /// Discards the contents.
  void reset();

 private:
  bool lies_here(const at::Tensor& gradient) const {
    return gradient.defined() && gradient.layout() == at::kStrided && gradient.is_alias_of(flat_);
  }
  bool can_copy_bytes(const at::Tensor& gradient) const;
  void copy_in(const at::Tensor& gradient) const;
  /// fill() in the usual case of a small gradient, without calls through the dispatcher. Returns false if it is not
  /// that case; then nothing has changed.
  bool take_small();
  /// Called before the slot is written: if the user still holds the .grad of an earlier step, gives that tensor its own
  /// memory.
  void part_with_handles();
  void keep();

  at::Tensor parameter_;
  at::Tensor flat_;
  at::Tensor gradient_;
  int64_t elements_;
  void* small_place_;   ///< its address if it is small, contiguous and on the CPU; else null
  at::Tensor kept_;     ///< the .grad of a parameter that this rank did not use
  at::Tensor content_;  ///< a copy of kept_ if that lies in this place, where the reduction writes
  bool filled_ = false;
  bool used_ = false;
  bool reduced_ = false;  ///< .grad holds only a reduced gradient, none of this rank alone
};

}  // namespace lockstep
