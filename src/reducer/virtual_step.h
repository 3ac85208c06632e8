#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "base/virtual_ranks.h"
#include "reducer/facts.h"

namespace lockstep {

/// Accumulates the gradients of one step of this process's virtual ranks into sums. These gradients are the leaves of
/// the tree (base/summation_tree.h), and arrive one after the other. Each parameter has a stack of partial sums, like
/// the digits of a binary counter; after the last leaf they are the whole subtrees that this process contributes.
///
/// Half precision is summed in fp32. A parameter that no leaf has reached yet has no tensors, which count as zeros.
///
/// A leaf behaves like a rank: its .grad starts as it was before the step, and its final .grad is the leaf's
/// contribution. Between leaves .grad is as before the step.
class VirtualStep {
 public:
  struct Settings {
    bool mean = true;            ///< the sum is divided by the number of virtual ranks
    bool first_adds_it = false;  ///< only virtual rank 0 contributes the .grad from before the step
  };
  VirtualStep(std::shared_ptr<VirtualRanks> ranks, const std::vector<at::Tensor>& parameters, Settings settings);

  VirtualRanks& ranks() const { return *ranks_; }
  int virtual_rank() const { return ranks_->block().first + leaf_; }
  bool at_last_leaf() const { return leaf_ + 1 == ranks_->block().size(); }
  bool complete() const { return leaf_ == ranks_->block().size(); }

  /// Saves .grad. Called before the step's first gradient.
  void begin();
  /// Called before a gradient is accumulated into .grad.
  void before_accumulation(size_t parameter);

  /// The weight and type of a leaf.
  struct Leaf {
    double weight = 1;
    std::optional<at::ScalarType> travels_as;  ///< rounded to this type, as a communication hook would
  };
  /// Adds the parameter's gradient that the leaf has computed. `used` = false: the leaf did not reach the parameter.
  void add(size_t parameter, bool used, const Leaf& leaf);
  bool is_added(size_t parameter) const { return sums_[parameter].added; }
  bool any_added() const;
  /// Whether a gradient was accumulated after add().
  bool is_late(size_t parameter) const;
  void add_late(size_t parameter, const Leaf& leaf);
  /// Adds nothing for the parameter, unless the leaf has already added something.
  void add_nothing(size_t parameter);
  /// Drops the leaf's .grad.
  void drop_leaf();
  /// Moves on to the next leaf.
  void end_leaf(const Facts& facts);

  /// The facts of each leaf that has ended.
  const std::vector<Facts>& facts() const { return facts_; }
  /// Whether some leaf reached the parameter.
  bool used(size_t parameter) const { return sums_[parameter].used; }
  /// The partial sums, from left to right; undefined means zeros.
  const std::vector<at::Tensor>& pieces(size_t parameter) const { return sums_[parameter].pieces; }
  /// Converts the sum over all virtual ranks to its final form. May overwrite `sum`.
  at::Tensor finished(at::Tensor sum, at::ScalarType type, std::optional<at::ScalarType> travelled_as) const;
  /// Whether the group's own reduction can sum a bucket of this type in place.
  bool sums_in_place(at::ScalarType type, std::optional<at::ScalarType> travels_as) const;
  const CombinePlan& plan() const { return plan_; }

  void reset();
  /// Ends the step on leaving the scope, including by an exception.
  class Ending {
   public:
    explicit Ending(VirtualStep& step) : step_(step) {}
    ~Ending() { step_.reset(); }
    Ending(const Ending&) = delete;

   private:
    VirtualStep& step_;
  };

  int passes = 0;          ///< backward passes of the current leaf
  int counted = 0;         ///< of these, those outside no_sync()
  bool completes = false;  ///< the running backward completes the leaf
  bool local_only = true;  ///< all passes of the step were within no_sync()
  bool in_place = false;   ///< all buckets are summed in place, so they can be sent early
  std::string trouble;     ///< errors of the leaves that have ended

 private:
  struct Sum {
    at::Tensor parameter;
    at::Tensor before;               ///< .grad before the step
    std::vector<at::Tensor> pieces;  ///< a stack
    bool added = false, used = false;
  };
  bool counts_before() const { return !settings_.first_adds_it || virtual_rank() == 0; }
  at::Tensor summand(at::Tensor gradient, const Leaf& leaf) const;
  void push(Sum& sum, at::Tensor value) const;

  const std::shared_ptr<VirtualRanks> ranks_;
  const Settings settings_;
  const CombinePlan plan_;
  std::vector<Sum> sums_;
  std::vector<Facts> facts_;
  int leaf_ = 0;
  bool begun_ = false;
};

/// The type in which elements of `type` are summed.
at::ScalarType sum_type(at::ScalarType type);

}  // namespace lockstep
