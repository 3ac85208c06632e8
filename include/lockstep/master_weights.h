#pragma once

#include <lockstep/cxx20.h>

#include <cstdint>
#include <utility>

#include <ATen/core/Tensor.h>

namespace lockstep {
class Group;
}

namespace lockstep::detail {

/// An optimizer that may keep its 16-bit parameters and their state in float. Its state_dict then has a "master_param".
class KeepsMasters {
 public:
  virtual bool keeps_masters() const = 0;

 protected:
  KeepsMasters() = default;
  KeepsMasters(const KeepsMasters&) = default;
  KeepsMasters& operator=(const KeepsMasters&) = default;
  ~KeepsMasters() = default;
};

/// An optimizer that may keep its state in slices, one on each rank.
class KeepsSlices {
 public:
  /// TORCH_CHECK fails if the meaning of state() is unknown, so that it can be neither saved nor loaded.
  virtual void check_state_is_known() const = 0;
  /// Makes state() whole until the next step, for saving.
  /// REQUIRES: every rank calls it if ranks share no memory.
  virtual void complete_state() const = 0;
  /// The ranks that each have memory only for a slice of state(); null if each has, or can access, all of it.
  virtual const Group* slice_holders() const = 0;
  /// Whether no rank may ever hold all of state(). It is then saved piece by piece, and only by a Checkpointer.
  virtual bool is_never_whole() const = 0;
  /// Gives the tensors of state() their whole shapes until the next step, in memory of which each rank has its slice.
  /// Does not communicate.
  virtual void show_slices() const = 0;
  /// The shape of the state of a parameter in the groups.
  virtual at::IntArrayRef sizes_of(const at::Tensor& parameter) const = 0;
  /// The elements, in the order of memory, that this rank uses of `value`, a loaded tensor of that shape without gaps.
  virtual std::pair<int64_t, int64_t> elements_to_load(const at::Tensor& parameter, const at::Tensor& value) const = 0;

 protected:
  KeepsSlices() = default;
  KeepsSlices(const KeepsSlices&) = default;
  KeepsSlices& operator=(const KeepsSlices&) = default;
  ~KeepsSlices() = default;
};

/// An optimizer whose next step copies what it needs of a loaded state into memory shared with other ranks.
class AdoptsState {
 public:
  virtual bool adopts_state() const = 0;

 protected:
  AdoptsState() = default;
  AdoptsState(const AdoptsState&) = default;
  AdoptsState& operator=(const AdoptsState&) = default;
  ~AdoptsState() = default;
};

}  // namespace lockstep::detail
