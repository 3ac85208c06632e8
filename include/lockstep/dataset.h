#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace lockstep {

/// Samples put together: the first dimension of both tensors counts them.
struct Batch {
  at::Tensor data;
  at::Tensor target;
};

/// A fixed number of samples, each reached by its index.
///
/// `size` and `get` must be callable from several threads at once: the workers of a DataLoader share one object.
/// Both must give the same answer whenever asked, and `size` the same on every rank.
class Dataset {
 public:
  virtual ~Dataset() = default;

  /// Number of samples.
  virtual int64_t size() const = 0;

  /// The samples at `indices` (each in 0 .. size() - 1, in any order, repetitions allowed), stacked in that order into
  /// tensors that the caller owns. What it throws reaches the loop of a DataLoader, at the batch in question.
  ///
  /// On a loader's worker, ATen's operators use one thread, so that the cores stay with training.
  virtual Batch get(at::ArrayRef<int64_t> indices) const = 0;

 protected:
  Dataset() = default;
  Dataset(const Dataset&) = default;
  Dataset(Dataset&&) = default;
  Dataset& operator=(const Dataset&) = default;
  Dataset& operator=(Dataset&&) = default;
};

}  // namespace lockstep
