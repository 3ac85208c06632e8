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
///     lockstep::RunningStatistics seen(std::vector<int64_t>{17});   // of vectors of 17 numbers
///     ...
///     seen->update(observations, context.group());                  // [n, 17], this rank's
///     policy(seen(observations));
///
/// Batches are merged as by Chan, Golub and LeVeque ("Updating Formulae and a Pairwise Algorithm for Computing Sample
/// Variances", 1979), in double and in rank order, so every rank has the same bits, which equal one process's to
/// rounding. Every rank must make its RunningStatistics of one shape in the same order; a clone counts as its original.
class RunningStatisticsImpl : public torch::nn::Cloneable<RunningStatisticsImpl> {
 public:
  /// `shape` is the shape of a sample. TORCH_CHECK fails for an epsilon or a limit that is negative or not finite.
  explicit RunningStatisticsImpl(std::vector<int64_t> shape, RunningStatisticsOptions options = {});
  /// Forgets all samples.
  void reset() override;
  /// Statistics remain double, also in a module that is converted to another dtype: the last bits of large sums would
  /// be lost without notice.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  /// Adds [n, shape...] real numbers of each rank, of at most 1e140; n may be 0, and may differ by rank. Every rank of
  /// `group` must call it. Sends one message: 16 bytes for each number of a sample, and 56. Throws Error on all ranks,
  /// which names ranks, and changes nothing, if a rank's samples have another shape, are complex or contain infinity,
  /// NaN or a number beyond 1e140, if the ranks' options, samples so far (count, mean and variance) or order of calls
  /// differ, or if a loaded state is none of samples.
  void update(const at::Tensor& samples, const Group& group);
  /// (x - mean) / sqrt(variance + epsilon), within the limit. x: [..., shape...], real; TORCH_CHECK fails for others,
  /// and after a state was loaded that is none of samples. Returns the same shape and dtype; of integers and bool, the
  /// default dtype. Does not communicate.
  at::Tensor forward(const at::Tensor& x);
  /// The inverse of forward(), without the limit; takes and returns what forward() does. Does not communicate.
  at::Tensor denormalized(const at::Tensor& x) const;

  /// Double, of `shape`; zeros and ones before the first sample. The variance is that of the population. Does not
  /// communicate.
  at::Tensor mean() const { return mean_; }
  at::Tensor variance() const;
  int64_t count() const;

 private:
  /// TORCH_CHECK fails if the buffers hold what no samples give.
  void check_held(const char* function) const;

  std::vector<int64_t> shape_;
  int64_t number_;  ///< of those of this shape that this process has made
  RunningStatisticsOptions options_;
  at::Tensor mean_, squares_, count_;  ///< squares: the sum of squared differences from the mean
  mutable uint64_t checked_ = 0;       ///< versions of the buffers that were looked at; 0: none
};
TORCH_MODULE(RunningStatistics);

/// (values - mean) / (deviation + epsilon), with the mean and the sample deviation of all ranks' values together, as
/// for the advantages of a batch. Returns the shape and dtype of `values`, which may be empty or differ in size by
/// rank; of integers and bool, the default dtype. Every rank of `group` must call it. Throws Error on all ranks, which
/// names ranks, if a rank has an undefined or complex tensor, infinity, NaN, a number beyond 1e140, or another epsilon.
/// TORCH_CHECK fails for an epsilon that is negative or not finite.
at::Tensor standardize(const at::Tensor& values, const Group& group, double epsilon = 1e-8);

}  // namespace lockstep
