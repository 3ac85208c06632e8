#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm_hook.h>
#include <lockstep/group.h>

#include "reducer/stream_order.h"

namespace lockstep {

/// Why the gradient of `parameter`, once of `elements` elements on `device`, cannot be reduced, or nullptr if it can.
const char* gradient_problem(const at::Tensor& parameter, int64_t elements, at::Device device);

/// Gradients of several parameters side by side in one flat tensor (bucket_layout), reduced as one message. After
/// backward, each parameter's .grad is a view of it.
///
/// Behind the gradients lies one element per parameter that says whether this rank used it. They are reduced together,
/// so every rank learns without another message which parameters no rank used. Behind those lie elements for the
/// reducer (notes).
class Bucket {
 public:
  /// The parameters share dtype and device. The flat tensor is allocated where `group` reduces it fastest. `notes`: the
  /// number of elements for the reducer, behind everything else.
  Bucket(std::vector<at::Tensor> parameters, const Group& group, int64_t notes);

  size_t size() const { return slots_.size(); }
  int64_t bytes() const;
  bool full() const { return missing_ == 0; }
  /// The gradients side by side, and what lies behind them: flags and notes.
  const at::Tensor& gradients() const { return gradients_; }
  const at::Tensor& tail() const { return tail_; }
  const at::Tensor& notes() const { return notes_; }

  /// Why the parameter's gradient cannot be reduced, or nullptr if it can.
  const char* problem(size_t slot) const;

  /// Takes the parameter's gradient: copies .grad into the slot unless it is there already; fills in zeros if there is
  /// none. `used`: a backward since the last reduction reached this parameter; ignored if there is no gradient. A slot
  /// may be filled again until the bucket is launched. `counts` = false, for sums: the slot may hold the result of an
  /// earlier reduction, which another rank contributes, so this rank contributes zeros. Returns nullptr, or the
  /// gradient's problem(); then the slot holds zeros.
  const char* fill(size_t slot, bool used, bool counts = true);
  /// Fills the slot with `sum` instead, a sum over virtual ranks, of which some reached the parameter if `used`; zeros
  /// where it is undefined. Null: a communication hook brings the content, and fills the whole bucket.
  void fill_sum(size_t slot, const at::Tensor* sum, bool used);
  /// Fills all slots with zeros, as not used. Call it before the bucket is launched.
  void fill_with_zeros();
  /// The piece of `flat`, which has the elements of gradients() in a row, where the slot's gradient lies, in its shape.
  at::Tensor place_in(const at::Tensor& flat, size_t slot) const;
  /// Where in gradients() the slot's gradient begins, in elements.
  int64_t offset_of(size_t slot) const { return slots_[slot].gradient.storage_offset() - gradients_.storage_offset(); }
  bool filled(size_t slot) const { return slots_[slot].filled; }
  /// Whether it was filled in with what .grad still is, in this place.
  bool current(size_t slot) const {
    return slots_[slot].filled && slots_[slot].parameter.grad().is_same(slots_[slot].gradient);
  }
  /// Whether it was filled in with a gradient.
  bool used(size_t slot) const { return slots_[slot].used; }

  /// For sums: the result of an earlier reduction must count once, not once per rank. If .grad lies here and holds one,
  /// sets it to zero before this rank's next gradient is added to it.
  void forget_reduced(size_t slot);

  /// On a device: what this thread queues from now on comes after all that has filled the bucket.
  void order_after_fills() { streams_.follow(); }

  /// Starts the reduction over all ranks. The bucket is full. A communication hook works on gradients() only; tail() is
  /// always reduced as it is, because flags would not survive compression.
  void launch(const Group& group, ReduceOp op);
  /// The same through a communication hook, to which this is bucket `index`. Returns what the hook has done wrong; empty
  /// if nothing. The tail of the last bucket waits for reduce_tail(), so that it can say what hooks end with.
  std::string launch_by(CommHook& hook, const Group& group, ReduceOp op, int64_t index, bool last);
  bool launched() const { return work_.has_value() || tail_waits_; }
  /// Waits until the reduction is done. Returns what the hook has done wrong; empty if nothing.
  std::string wait();
  /// After wait(): whether the tail has yet to be reduced.
  bool tail_waits() const { return tail_waits_; }
  void reduce_tail(const Group& group, ReduceOp op);

  /// From launch() to finish(), .grad is undefined, so a gradient that arrives late is put there alone. Takes all such
  /// gradients; returns whether there were any.
  bool take_late();
  /// After wait(), on all ranks if one of them has late gradients: reduces those as well, and adds them.
  void reduce_late(const Group& group, ReduceOp op, double weight);

  /// Moves .grad, if there is one, into this bucket. `reduced`: it holds what another bucket has reduced.
  void adopt(size_t slot, bool reduced);

  /// After wait(): makes each parameter's .grad the view that holds its reduced gradient. A parameter that no rank used
  /// keeps the .grad it had, bit by bit; returns the slots of those. The bucket is empty again.
  std::vector<size_t> finish();

  /// After finish(): this parameter's .grad if it lies in this bucket, else an undefined tensor.
  at::Tensor gradient_here(size_t slot) const;

  /// Forgets what was filled in, as after a backward that an exception ended.
  void reset();

 private:
  struct Slot {
    at::Tensor parameter;
    at::Tensor gradient;  ///< its place in flat_, with its shape and strides
    int64_t elements;     ///< of that place
    void* small_place;    ///< its address if it is small, contiguous and on the CPU; else null
    at::Tensor kept;      ///< the .grad of a parameter that this rank did not use
    at::Tensor content;   ///< a copy of `kept` if that lies here, where the reduction writes
    at::Tensor late;      ///< a gradient that came after launch()
    bool filled = false;
    bool used = false;
    bool reduced = false;  ///< .grad holds a reduced gradient and nothing of this rank alone
  };

  void copy_in(const Slot& slot, const at::Tensor& gradient) const;
  bool lies_here(const at::Tensor& gradient) const {
    return gradient.defined() && gradient.layout() == at::kStrided && gradient.is_alias_of(flat_);
  }
  /// Before the slot is written: if the user still holds the .grad of an earlier step, that tensor gets memory of its
  /// own.
  void part_with_handles(Slot& slot);
  void keep(Slot& slot);
  /// Between gradients there are zeros.
  void clear_gaps() const;
  void write_flags();
  /// Gradients that arrive from now on must not be added to what is being reduced.
  void let_go_of_gradients();

  at::Tensor flat_;       ///< all gradients, one "used" element per parameter, the notes
  at::Tensor gradients_;  ///< views of flat_
  at::Tensor used_;
  at::Tensor notes_;
  at::Tensor tail_;  ///< used_ and notes_
  std::vector<Slot> slots_;
  size_t missing_;
  StreamOrder streams_;       ///< the streams that fill it
  std::optional<Work> work_;  ///< of the whole bucket, or of tail() if there is a hook
  CommHook::Finish finish_;   ///< the hook's
  at::Tensor handed_;         ///< what the hook was given as gradients(): a view of its own
  std::vector<at::Tensor> handed_parts_;  ///< and as the gradients of parameters
  bool tail_waits_ = false;
};

}  // namespace lockstep
