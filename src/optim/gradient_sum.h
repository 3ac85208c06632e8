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

/// The gradients of all ranks, between Reducer::settle() and end_step(). Each rank's gradients lie in its buckets,
/// where the others read them. norm(), which needs all sums before the step, first collects the sums of its slices in
/// its own buckets, where no other rank reads them. Ranks that share no memory receive the sums of their slices
/// (SliceSums); on a device these are tensors (slice_of) instead of addresses.
class GradientSum {
 public:
  using Share = Reducer::Share;
  using Settlement = Reducer::Settlement;
  GradientSum(ReplicaState& model, const Areas& areas) : model_(model), areas_(areas), sums_(areas, model.group) {}

  /// Calls Reducer::settle() unless it has been called for this step.
  /// REQUIRES: every rank calls it.
  const Settlement& settle(Share share);
  const Settlement& settlement() const { return settlement_; }
  /// Ends the step.
  /// REQUIRES: every rank calls it.
  void conclude();

  /// Brings this rank its sums, if ranks share no memory. Called before source() and norm().
  /// REQUIRES: every rank calls it.
  void collect();

  /// The parameter's index among the trained ones; none if it is not one of them.
  std::optional<size_t> index_of(const at::Tensor& parameter) const;
  bool is_used(size_t trained) const { return settlement_.used[trained]; }
  optim::GradientSource source(size_t trained) const;
  /// This rank's part of the sum, flat. On a device, call collect() first.
  at::Tensor slice_of(size_t trained);

  /// The norm of all gradients as one vector. Leaves no .grad. On a device its last bits depend on the number of ranks.
  /// REQUIRES: every rank calls it.
  double norm(double type);
  void multiply(double factor) { factors_.push_back(factor); }

  /// Bytes read and written by norm() so far.
  int64_t bytes_moved() const { return bytes_moved_; }

 private:
  struct Place {
    size_t bucket;
    int64_t offset;       ///< in the bucket's elements
    int64_t first_block;  ///< of the norm
    at::Tensor mine{};    ///< this rank's gradient, flat; undefined if ranks share memory
  };

  bool share_memory() const { return areas_.memory() != nullptr; }
  /// Finds the addresses of all ranks' buckets.
  /// REQUIRES: every rank calls it.
  void bind();
  double norm_on_device(double type);
  /// The address for this rank's sums: its own gradient's or, if ranks share no memory, SliceSums::place_of().
  void apply_factors();
  /// The address of a rank's gradient, in shared memory.
  std::byte* place_of(size_t trained, int rank) const;
  /// The address for this rank's sums, in the place of a whole gradient.
  std::byte* place_of_sums(size_t trained) const;
  /// The contribution of these elements of a parameter to a norm. First puts their sum into this rank's bucket, unless
  /// it is already there.
  double contribution(const optim::GradientSource& source, size_t trained, int64_t begin, int64_t end,
                      const GradientNorm& norm) const;

  ReplicaState& model_;
  const Areas& areas_;
  SliceSums sums_;
  int attachment_ = 0;  ///< of the reducer that was bound
  std::unordered_map<const c10::TensorImpl*, size_t> indices_;
  std::vector<Place> places_;                     ///< by trained parameter
  std::vector<std::vector<std::byte*>> buckets_;  ///< their addresses, by bucket and rank; null without shared memory
  int64_t blocks_ = 0;
  Settlement settlement_;
  bool collected_ = false;  ///< sums_ holds the sums
  bool gathered_ = false;   ///< the sums of this rank's slices are in place_of_sums(), multiplied
  std::vector<double> factors_;
  int64_t bytes_moved_ = 0;
};

}  // namespace lockstep::detail
