#pragma once

#include <lockstep/cxx20.h>

#include <cstdint>
#include <functional>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace lockstep {

/// Several samples: the first dimension of both tensors counts them.
struct Batch {
  at::Tensor data{};
  at::Tensor target{};

  /// Calls `visit` for both.
  void for_each_tensor(const std::function<void(at::Tensor&)>& visit) {
    visit(data);
    visit(target);
  }
};

/// The inputs of random transforms besides the sample itself, and the transforms' report.
struct Draw {
  /// The loader's seed; the same on every rank.
  uint64_t seed = 0;
  int epoch = 0;
  /// Transforms that the samples have gone through in this call. It makes nested datasets draw differently.
  int transforms = 0;
  /// Seconds of this call spent in transforms. A dataset that transforms adds its own.
  double transform_seconds = 0;
};

/// A fixed number of samples, accessed by index.
///
/// `size` and `get` must be callable from several threads at once: the workers of a DataLoader share one object. Both
/// must always return the same result, and `size` must be the same on every rank.
class Dataset {
 public:
  virtual ~Dataset() = default;

  /// Number of samples.
  virtual int64_t size() const = 0;

  /// The samples at `indices` (each in 0 .. size() - 1, in any order, repetitions allowed), stacked in that order. The
  /// caller owns the tensors. A DataLoader rethrows an exception in the loop, at its batch.
  ///
  /// On a loader's worker, ATen's operators use one thread, which leaves the cores to training.
  virtual Batch get(at::ArrayRef<int64_t> indices) const = 0;

  /// The samples as they are in one epoch; a DataLoader calls this. Datasets whose samples change from epoch to epoch
  /// override it. The result may depend on the arguments only, so that it is the same on any number of ranks and
  /// workers, and after a resume. Must be as thread-safe as `get`.
  virtual Batch draw(at::ArrayRef<int64_t> indices, Draw& draw) const {
    static_cast<void>(draw);
    return get(indices);
  }

 protected:
  Dataset() = default;
  Dataset(const Dataset&) = default;
  Dataset(Dataset&&) = default;
  Dataset& operator=(const Dataset&) = default;
  Dataset& operator=(Dataset&&) = default;
};

}  // namespace lockstep
