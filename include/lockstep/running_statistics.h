#pragma once

#include <lockstep/cxx20.h>

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <lockstep/group.h>

namespace lockstep {

struct RunningStatisticsOptions {
  double epsilon = 1e-8;  ///< added to the variance before its root is taken
  double limit = 10;      ///< of forward()'s results, on both sides; 0: none
};

/// Mean and variance of all samples that all ranks have seen so far, to normalize observations and returns as they
/// arrive. They are buffers, so state_dict() and a Checkpointer include them.
///
///     lockstep::RunningStatistics seen({17});                       // of vectors of 17 numbers
///     ...
///     seen->update(observations, context.group());                  // [n, 17], this rank's
///     policy(seen(observations));
///
/// Batches are merged as by Chan, Golub and LeVeque ("Updating Formulae and a Pairwise Algorithm for Computing Sample
/// Variances", 1979), in double and in rank order, so every rank has the same bits, which equal one process's to
/// rounding.
class RunningStatisticsImpl : public torch::nn::Cloneable<RunningStatisticsImpl> {
 public:
  /// `shape` is the shape of a sample. TORCH_CHECK fails for an epsilon or a limit that is negative or not finite.
  explicit RunningStatisticsImpl(std::vector<int64_t> shape, RunningStatisticsOptions options = {});
  void reset() override;

  /// Adds [n, shape...] samples of each rank; n may be 0, and may differ by rank. Every rank of `group` must call it.
  /// Sends one message of 16 bytes for each number of a sample. Throws Error on all ranks, and changes nothing, if a
  /// rank's samples have another shape or contain infinity or NaN.
  void update(const at::Tensor& samples, const Group& group);
  /// (x - mean) / sqrt(variance + epsilon), within the limit. x: [..., shape...]. Returns the same shape and dtype.
  /// Does not communicate.
  at::Tensor forward(const at::Tensor& x) const;
  /// The inverse of forward(), without the limit. Does not communicate.
  at::Tensor denormalized(const at::Tensor& x) const;

  /// Double, of `shape`; zeros and ones before the first sample. The variance is that of the population. Does not
  /// communicate.
  at::Tensor mean() const { return mean_; }
  at::Tensor variance() const;
  int64_t count() const;

 private:
  std::vector<int64_t> shape_;
  RunningStatisticsOptions options_;
  at::Tensor mean_, squares_, count_;  ///< squares: the sum of squared differences from the mean
};
TORCH_MODULE(RunningStatistics);

/// (values - mean) / (deviation + epsilon), with the mean and the sample deviation of all ranks' values together, as
/// for the advantages of a batch. Returns the shape and dtype of `values`, which may be empty or differ in size by
/// rank. Every rank of `group` must call it. Throws Error on all ranks if a rank has infinity or NaN.
at::Tensor standardize(const at::Tensor& values, const Group& group, double epsilon = 1e-8);

}  // namespace lockstep
