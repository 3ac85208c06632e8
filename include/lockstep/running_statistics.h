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
  double limit = 10;      ///< of what forward() returns, on both sides; 0: none
};

/// Mean and variance of all samples that all ranks have seen so far, for observations and returns that are normalized
/// as they come. They are buffers, so state_dict() and a Checkpointer have them.
///
///     lockstep::RunningStatistics seen({17});                       // of vectors of 17 numbers
///     ...
///     seen->update(observations, context.group());                  // [n, 17], this rank's
///     policy(seen(observations));
///
/// Batches are merged as by Chan, Golub and LeVeque ("Updating Formulae and a Pairwise Algorithm for Computing Sample
/// Variances", 1979), in double and in the order of ranks, so every rank has the same bits, which are those of one
/// process to rounding.
class RunningStatisticsImpl : public torch::nn::Cloneable<RunningStatisticsImpl> {
 public:
  /// `shape`: of a sample. TORCH_CHECK fails for an epsilon or a limit that is negative or not finite.
  explicit RunningStatisticsImpl(std::vector<int64_t> shape, RunningStatisticsOptions options = {});
  void reset() override;

  /// Adds [n, shape...] samples of each rank; n may be 0, and differ. Every rank of `group` calls it: one message of 16
  /// bytes for each number of a sample. Throws Error on all ranks, and changes nothing, if a rank's samples have
  /// another shape, or infinity or NaN among them.
  void update(const at::Tensor& samples, const Group& group);
  /// (x - mean) / sqrt(variance + epsilon), within the limit. x: [..., shape...]; returns its shape and dtype. No
  /// message.
  at::Tensor forward(const at::Tensor& x) const;
  /// The reverse, without the limit. No message.
  at::Tensor denormalized(const at::Tensor& x) const;

  /// Double, of `shape`; zeros and ones before the first sample. The variance is that of the population. No message.
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
/// for the advantages of a batch. Returns the shape and dtype of `values`, which may be empty and of other sizes on
/// other ranks. Every rank of `group` calls it. Throws Error on all ranks if a rank has infinity or NaN.
at::Tensor standardize(const at::Tensor& values, const Group& group, double epsilon = 1e-8);

}  // namespace lockstep
