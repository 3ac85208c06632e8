#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "reducer/piece_exchange.h"
#include "reducer/reduction.h"
#include "reducer/virtual_step.h"

namespace lockstep {

/// Reduces the gradients of several virtual ranks that this process works for, one after the other. Each backward (or
/// each `accumulate` of them) is a leaf of the summation tree:
///
///   before the first gradient   VirtualStep::begin remembers .grad
///   a gradient is ready         add_to_sum moves it out of .grad into the partial sums; with the last leaf, fill_sum
///                               puts the parameter's sum into its bucket, and full buckets are sent
///   the backward ends           end_leaf notes the leaf's facts, one row of the table; after the last one, reduce_all
///
/// A bucket that can be summed in place (VirtualStep::sums_in_place) is sent like any other; otherwise its pieces are
/// sent (PieceExchange). The table of facts has a row for each virtual rank, and means are over virtual ranks.
class VirtualReduction final : public Reduction {
 public:
  VirtualReduction(ReductionParts& parts, std::shared_ptr<VirtualRanks> ranks);

  void begin() override;
  void backward_begins() override;
  void before_gradient(size_t parameter) override { step_.before_accumulation(parameter); }
  bool acts_before_gradients() const override { return true; }
  void ready(size_t parameter) override;
  void backward_ended() override;
  void reduce() override;
  void skip() override;
  std::optional<std::vector<Facts>> shadow() override;
  void fail(const std::string& trouble) override;
  void equipment_changed() override;
  /// Called when this process has left the virtual rank. In the middle of an accumulation this means that its data has
  /// ended.
  void left(std::optional<int> virtual_rank);
  /// Backward passes of the present virtual rank that accumulate() keeps back.
  int accumulating() const { return step_.counted; }

 private:
  std::optional<at::ScalarType> travels_as(at::ScalarType type) const;
  VirtualStep::Leaf leaf_of(size_t parameter) const;
  void add_to_sum(size_t parameter);
  /// Puts the parameter's partial sums into its bucket, or into its exchange.
  void fill_sum(size_t parameter);
  /// The exchange that carries the bucket's pieces; null if the bucket is summed in place.
  PieceExchange* exchange_of(size_t bucket);
  void end_leaf(Share share);
  /// Whether the bucket already contains .grad, or what was added to it.
  bool lies_in_bucket(size_t parameter) const;
  std::vector<Facts> reduce_all(Share share);
  /// Ends the remaining leaves, sends the remaining buckets, and waits. Returns the facts of all virtual ranks.
  std::vector<Facts> add_up_sums(Share share);
  void turn_sums_into_gradients(double scale);

  ReductionParts& parts_;
  VirtualStep step_;
  std::vector<std::unique_ptr<PieceExchange>> exchanges_;  ///< by bucket; may be null
};

}  // namespace lockstep
