#pragma once

#include <optional>
#include <unordered_map>
#include <vector>

#include "data_parallel/gradient_norm.h"
#include "data_parallel/replica_state.h"
#include "optim/areas.h"
#include "optim/gradient_source.h"
#include "optim/slice_sums.h"

namespace lockstep::detail {

/// The gradients of all ranks, between Reducer::settle() and end_step(): each rank's lie in its buckets, where the
/// others read them. Who needs all of them before the step (norm) takes the sums of its slices into its own buckets
/// first, where nobody else reads them. Where ranks share no memory, each receives the sums of its slices (SliceSums);
/// on a device these are not read from addresses, but handed out as tensors (slice_of).
class GradientSum {
 public:
  using Share = Reducer::Share;
  using Settlement = Reducer::Settlement;
  GradientSum(ReplicaState& model, const Areas& areas) : model_(model), areas_(areas), sums_(areas, model.group) {}

  /// Reducer::settle(), unless it has been called for this step. Every rank calls it.
  const Settlement& settle(Share share);
  const Settlement& settlement() const { return settlement_; }
  /// Every rank calls it when the step has been taken.
  void conclude();

  /// Before source() and norm(): where ranks share no memory, brings this rank the sums. Every rank calls it.
  void collect();

  /// The parameter's number among the trained ones; none if it is not one of them.
  std::optional<size_t> index_of(const at::Tensor& parameter) const;
  bool is_used(size_t trained) const { return settlement_.used[trained]; }
  optim::GradientSource source(size_t trained) const;
  /// On a device, after collect(): this rank's part of the sum, flat.
  at::Tensor slice_of(size_t trained);

  /// The norm of all gradients as one vector. Every rank calls it. No .grad is left. On a device its last bits depend
  /// on the number of ranks.
  double norm(double type);
  /// From now on all gradients are multiplied by it.
  void multiply(double factor) { factors_.push_back(factor); }

  /// Read and written by norm() so far.
  int64_t bytes_moved() const { return bytes_moved_; }

 private:
  struct Place {
    size_t bucket;
    int64_t offset;       ///< in its elements
    int64_t first_block;  ///< of the norm
    at::Tensor mine{};    ///< this rank's gradient, flat; undefined where ranks share memory
  };

  bool share_memory() const { return areas_.memory() != nullptr; }
  /// Finds out where all ranks' buckets lie. Every rank calls it.
  void bind();
  double norm_on_device(double type);
  /// On a device: multiplies the sums by what they are to be multiplied by.
  void apply_factors();
  /// Where a rank's gradient begins, in shared memory.
  std::byte* place_of(size_t trained, int rank) const;
  /// Where this rank's sums are written: there, between the places of a whole gradient.
  std::byte* place_of_sums(size_t trained) const;
  /// The contribution of these elements of a parameter to a norm. First puts their sum into this rank's bucket, unless
  /// it is there already.
  double contribution(const optim::GradientSource& source, size_t trained, int64_t begin, int64_t end,
                      const GradientNorm& norm) const;

  ReplicaState& model_;
  const Areas& areas_;
  SliceSums sums_;
  int attachment_ = 0;  ///< of the reducer that this knows
  std::unordered_map<const c10::TensorImpl*, size_t> indices_;
  std::vector<Place> places_;                     ///< by trained parameter
  std::vector<std::vector<std::byte*>> buckets_;  ///< where they begin, by bucket and rank; null without shared memory
  int64_t blocks_ = 0;
  Settlement settlement_;
  bool collected_ = false;  ///< sums_ has them
  bool gathered_ = false;   ///< the sums of this rank's slices lie in place_of_sums(), multiplied
  std::vector<double> factors_;
  int64_t bytes_moved_ = 0;
};

}  // namespace lockstep::detail
