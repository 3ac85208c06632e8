#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>

#include "reducer/gradient_slot.h"
#include "reducer/stream_order.h"

namespace lockstep {

/// Gradients of several parameters side by side in one flat tensor (bucket_layout), reduced as one message
/// (BucketTransfer). After backward, each parameter's .grad is a view of it.
///
/// The gradients are followed by one element per parameter that says whether this rank used it. These elements are
/// reduced with the gradients, so every rank learns which parameters no rank used, without another message. They are
/// followed by elements for the reducer (notes).
class Bucket {
 public:
  /// The parameters share dtype and device. The flat tensor is allocated where `group` reduces it fastest. `notes` is
  /// the number of elements for the reducer at the end.
  Bucket(std::vector<at::Tensor> parameters, const Group& group, int64_t notes);

  size_t size() const { return slots_.size(); }
  int64_t bytes() const { return static_cast<int64_t>(flat_.nbytes()); }
  bool full() const { return missing_ == 0; }
  /// The whole message: the gradients side by side, and the tail after them, which ends with the notes. On a device it
  /// has the gradients alone: the tail is a message of its own, on the CPU, so that reading it does not wait for the
  /// device.
  const at::Tensor& flat() const { return flat_; }
  const at::Tensor& gradients() const { return gradients_; }
  const at::Tensor& tail() const { return tail_; }
  bool has_tail_apart() const { return !flat_.is_cpu(); }
  const at::Tensor& notes() const { return notes_; }
  GradientSlot& slot(size_t index) { return slots_[index]; }
  const GradientSlot& slot(size_t index) const { return slots_[index]; }

  /// Takes the parameter's gradient: copies .grad into the slot unless it is there already; fills in zeros if there is
  /// none. `used`: a backward since the last reduction reached this parameter; ignored if there is no gradient. A slot
  /// may be filled again until the bucket is sent. `counts` = false, for sums: the slot may hold the result of an
  /// earlier reduction, which another rank contributes, so this rank contributes zeros. Returns nullptr, or the
  /// gradient's problem(), in which case the slot holds zeros.
  const char* fill(size_t slot, bool used, bool counts = true);
  /// Fills the slot with `sum` instead: a sum over several backward passes, some of which reached the parameter if
  /// `used`; zeros if it is undefined. Null: a communication hook supplies the content, and fills the whole bucket.
  void fill_sum(size_t slot, const at::Tensor* sum, bool used);
  /// Fills all slots with zeros, marked unused.
  /// REQUIRES: the bucket has not been sent.
  void fill_with_zeros();
  /// The slot's place in `flat`, which is laid out as gradients(), with its parameter's shape and strides.
  at::Tensor place_in(const at::Tensor& flat, size_t slot) const;
  /// The offset in gradients() of the slot's gradient, in elements.
  int64_t offset_of(size_t slot) const {
    return slots_[slot].gradient().storage_offset() - gradients_.storage_offset();
  }

  /// On a device: orders this thread's further work after all work that has filled the bucket.
  void order_after_fills() { streams_.follow(); }
  /// Writes after the gradients which parameters this rank used. Called before the bucket is sent.
  void write_flags();
  /// Called when the bucket has been sent: later gradients must not be added to it, and go into .grad alone.
  void let_go_of_gradients();
  /// Moves all such gradients out of .grad. Returns whether there were any.
  bool set_aside_late();
  /// These gradients, side by side as in gradients(), with zeros between them.
  at::Tensor late_gradients();
  /// Fills the gaps between gradients with zeros.
  void clear_gaps() const;

  /// Called when the bucket is reduced: makes each parameter's .grad the view that holds its reduced gradient. A
  /// parameter that no rank used keeps its previous .grad, bit for bit. Returns the slots of these parameters, and
  /// empties the bucket.
  std::vector<size_t> finish();
  /// Discards the contents, for example after an exception ended a backward.
  void reset();

 private:
  at::Tensor flat_;       ///< all gradients and, on the CPU, the tail
  at::Tensor gradients_;  ///< a view of flat_
  at::Tensor tail_;       ///< one "used" element per parameter, the notes
  at::Tensor used_;       ///< views of tail_
  at::Tensor notes_;
  std::vector<GradientSlot> slots_;
  std::vector<at::Tensor> late_;  ///< by slot; empty: none
  size_t missing_;
  StreamOrder streams_;  ///< the streams that fill it
};

}  // namespace lockstep
