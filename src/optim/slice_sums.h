#pragma once

#include <functional>
#include <vector>

#include <lockstep/group.h>

#include "optim/areas.h"

namespace lockstep::detail {

/// Sums of gradients for ranks that share no memory: each rank receives its slices' sums, by reduce_scatters of a part
/// of every rank's slice. Two are in flight at once, so that one is sent while the next is assembled. Takes memory for
/// the sums of one slice and two messages.
class SliceSums {
 public:
  SliceSums(const Areas& areas, Group group) : areas_(areas), group_(std::move(group)) {}

  /// A parameter's gradient on this rank, flat, in the parameter's memory order; null: no rank has one.
  using GradientOf = std::function<const at::Tensor*(const Areas::Parameter& parameter)>;
  /// Brings this rank its sums.
  /// REQUIRES: every rank calls it.
  void bring(const GradientOf& gradient_of, ReduceOp op);

  /// The address at which a parameter's sums would begin. Only this rank's slice is in memory.
  std::byte* place_of(const Areas::Parameter& parameter) const;
  /// This rank's part of a parameter's sums, flat.
  at::Tensor mine(const Areas::Parameter& parameter) const { return areas_.mine(sums_[parameter.area], parameter); }
  /// Multiplies all of this rank's sums.
  void multiply(double factor);

 private:
  void bring(size_t area, const GradientOf& gradient_of, ReduceOp op);
  /// Fills `row` with this rank's values of elements [begin, begin + row.numel()) of an area; zeros where there are
  /// none.
  void fill(const at::Tensor& row, size_t area, int64_t begin, const GradientOf& gradient_of) const;

  const Areas& areas_;
  const Group group_;
  std::vector<at::Tensor> sums_;  ///< by area: an array like it
  at::Tensor staging_;            ///< bytes
};

}  // namespace lockstep::detail
