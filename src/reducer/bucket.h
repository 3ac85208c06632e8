#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm_hook.h>
#include <lockstep/group.h>

#include "reducer/stream_order.h"

namespace lockstep {

/// Gradients of several parameters side by side in one flat tensor, reduced as one message. A parameter's .grad is a
/// view of it after backward.
///
/// Behind the gradients lies one element a parameter that says whether this rank used it; it is reduced with them. So
/// every rank learns which parameters nobody used, without another message. Then come elements for the reducer's use.
class Bucket {
 public:
  /// The parameters share dtype and device. The flat tensor lies where `group` reduces it fastest. `notes`: elements
  /// that travel behind everything else.
  Bucket(std::vector<at::Tensor> parameters, const Group& group, int64_t notes);

  size_t size() const { return slots_.size(); }
  int64_t bytes() const;
  bool full() const { return missing_ == 0; }
  /// The gradients side by side, and what travels behind them: flags and notes.
  const at::Tensor& gradients() const { return gradients_; }
  const at::Tensor& tail() const { return tail_; }
  const at::Tensor& notes() const { return notes_; }

  /// Why the gradient that the parameter has cannot be reduced, or nullptr.
  const char* problem(size_t slot) const;

  /// Takes the parameter's gradient: copies .grad in unless it lies here already; zeros if there is none.
  /// `used`: the backward passes since the last reduction reached this parameter; without a gradient that is not so. A
  /// slot may be filled again until the bucket is launched. `counts`: false: where ranks' gradients are added up, what
  /// an earlier reduction left here is counted by another rank, so zeros go in its place. Returns its problem(), with
  /// zeros in its place, or nullptr.
  const char* fill(size_t slot, bool used, bool counts = true);
  /// Fills all slots with zeros, not used. The bucket has not been launched.
  void fill_with_zeros();
  bool filled(size_t slot) const { return slots_[slot].filled; }

  /// Where ranks' gradients are added up, what an earlier reduction left in .grad counts once, not once a rank: sets it
  /// to zero, where it lies here, before this rank's next gradient is added to it.
  void forget_reduced(size_t slot);

  /// Starts the reduction over all ranks. The bucket is full. Whatever changes how gradients travel (a communication
  /// hook) works on gradients() and must reduce tail() as it is: flags survive no compression.
  void launch(const Group& group, ReduceOp op);
  /// The same by a communication hook, to which this is bucket `index`.
  void launch_by(CommHook& hook, const Group& group, ReduceOp op, int64_t index, bool last);
  bool launched() const { return work_.has_value(); }
  /// Waits until the reduction is done.
  void wait();

  /// Gradients that came after launch() lie in .grad, because that is undefined until finish(). Takes them: returns
  /// whether there were any.
  bool take_late();
  /// After wait(), on all ranks if one of them has late gradients: reduces them, too, and adds them.
  void reduce_late(const Group& group, ReduceOp op, double weight);

  /// Makes .grad, if there is one, the view in this bucket; it holds what another bucket reduced.
  void adopt(size_t slot);

  /// After wait(): leaves each parameter's .grad as the view that holds its reduced gradient. A parameter that no rank
  /// used keeps the .grad it had, bit by bit; returns the slots of those. The bucket is empty again.
  std::vector<size_t> finish();

  /// After finish(): this parameter's .grad, if it is the view that lies here, else undefined.
  at::Tensor gradient_here(size_t slot) const;

  /// Forgets what was filled: a backward ended by an exception.
  void reset();

 private:
  struct Slot {
    at::Tensor parameter;
    at::Tensor gradient;  ///< its place in flat_, with its shape and strides
    int64_t elements;     ///< of that place
    void* small_place;    ///< where that begins, if it is small, contiguous and the CPU's; else null
    at::Tensor kept;      ///< the .grad of a parameter that this rank did not use
    at::Tensor content;   ///< a copy of what it holds, if it lies here, where the reduction writes
    at::Tensor late;      ///< what came after launch()
    bool filled = false;
    bool used = false;
    bool reduced = false;  ///< .grad holds a reduced gradient and nothing of this rank alone
  };

  void copy_in(const Slot& slot, const at::Tensor& gradient) const;
  bool lies_here(const at::Tensor& gradient) const {
    return gradient.defined() && gradient.layout() == at::kStrided && gradient.is_alias_of(flat_);
  }
  /// Before the slot is written: if a user has kept the .grad of an earlier step, that tensor gets memory of its own.
  void part_with_handles(Slot& slot);
  void keep(Slot& slot);
  void write_flags();
  /// What comes from now on must not be added to what is under way.
  void let_go_of_gradients();

  at::Tensor flat_;       ///< all gradients, one "used" element a parameter, the notes
  at::Tensor gradients_;  ///< views of flat_
  at::Tensor used_;
  at::Tensor notes_;
  at::Tensor tail_;  ///< used_ and notes_
  std::vector<Slot> slots_;
  size_t missing_;
  StreamOrder streams_;       ///< those that fill it
  std::optional<Work> work_;  ///< of the whole bucket, or of what a hook leaves alone
  CommHook::Finish finish_;   ///< the hook's
};

}  // namespace lockstep
