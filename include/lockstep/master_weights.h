#pragma once

#include <lockstep/cxx20.h>

namespace lockstep {
class Group;
}

namespace lockstep::detail {

/// An optimizer that may keep its 16-bit parameters and their state in float; its state_dict has a "master_param" then.
class KeepsMasters {
 public:
  virtual bool keeps_masters() const = 0;

 protected:
  KeepsMasters() = default;
  KeepsMasters(const KeepsMasters&) = default;
  KeepsMasters& operator=(const KeepsMasters&) = default;
  ~KeepsMasters() = default;
};

/// An optimizer that may keep what it remembers in slices, one on each rank.
class KeepsSlices {
 public:
  /// TORCH_CHECK fails where state() says nothing to others, so that it can be neither saved nor loaded.
  virtual void check_state_is_known() const = 0;
  /// Makes state() whole until the next step, to be saved. Every rank calls it where ranks share no memory.
  virtual void complete_state() const = 0;
  /// The ranks of which each has memory for a slice of state() only; null where each has, or reaches, all of it.
  virtual const Group* slice_holders() const = 0;

 protected:
  KeepsSlices() = default;
  KeepsSlices(const KeepsSlices&) = default;
  KeepsSlices& operator=(const KeepsSlices&) = default;
  ~KeepsSlices() = default;
};

/// An optimizer that copies what it needs of a loaded state in its next step, into memory that other ranks share.
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
