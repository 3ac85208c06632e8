#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>

namespace lockstep {

/// Gradients of several parameters side by side in one flat tensor, reduced as one message. A parameter's .grad is a
/// view of it after backward.
///
/// Behind the gradients lies one element a parameter that says whether this rank used it; it is reduced with them. So
/// every rank learns which parameters nobody used, without another message.
class Bucket {
 public:
  /// The parameters share dtype and device. The flat tensor lies where `group` reduces it fastest.
  Bucket(std::vector<at::Tensor> parameters, const Group& group);

  size_t size() const { return slots_.size(); }
  int64_t bytes() const;
  bool full() const { return missing_ == 0; }
  /// The gradients side by side, and what travels behind them.
  const at::Tensor& gradients() const { return gradients_; }
  const at::Tensor& tail() const { return used_; }

  /// Takes the parameter's gradient: copies .grad in unless it lies here already; zeros if there is none.
  /// `used`: the backward passes since the last reduction reached this parameter.
  void fill(size_t slot, bool used);
  bool filled(size_t slot) const { return slots_[slot].filled; }

  /// Starts the reduction over all ranks. The bucket is full. Whatever changes how gradients travel (a communication
  /// hook) works on gradients() and must reduce tail() as it is: flags survive no compression.
  void launch(const Group& group, ReduceOp op);
  bool launched() const { return work_.has_value(); }

  /// Waits for the mean and leaves each parameter's .grad as the view that holds it. A parameter that no rank used
  /// keeps the .grad it had. The bucket is empty again.
  void finish();

  /// Forgets what was filled: a backward ended by an exception.
  void reset();

 private:
  struct Slot {
    at::Tensor parameter;
    at::Tensor gradient;  ///< its place in flat_, with its shape and strides
    at::Tensor kept;      ///< the .grad of a parameter that this rank did not use
    bool filled = false;
    bool used = false;
  };

  at::Tensor flat_;       ///< all gradients, then one "used" element a parameter
  at::Tensor gradients_;  ///< view of the former
  at::Tensor used_;       ///< view of the latter
  std::vector<Slot> slots_;
  size_t missing_;
  std::optional<Work> work_;
};

}  // namespace lockstep
