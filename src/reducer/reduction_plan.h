#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/gradient_reduction.h>
#include <lockstep/group.h>
#include <lockstep/named_tensors.h>

#include "base/virtual_ranks.h"
#include "reducer/bucket_plan.h"
#include "reducer/gradient_marks.h"

namespace lockstep {

struct ReductionSettings {
  BucketLimits limits;
  GradientReduction reduction;
  int object = 1;        ///< this replica's number on its group, from 1; the same on all ranks
  bool list = false;     ///< the parameters are a list, whose tensors may have been replaced
  bool buffers = false;  ///< the model has buffers, which a forward may change
};

/// The constant facts about the reduction of a set of parameters, equal on all ranks: the bucket of each parameter, and
/// how buckets are summed.
struct ReductionPlan {
  ReductionPlan(const NamedTensors& parameters, Group group, ReductionSettings settings);

  /// False in a world of one.
  bool has_buckets() const { return !buckets.empty(); }
  bool averages() const { return op() == ReduceOp::kMean; }
  ReduceOp op() const;
  /// Hooks of parameters on a CPU run on the thread that called backward.
  bool on_cpu() const { return tensors.front().is_cpu(); }
  /// For sums: whether rank 0 contributes the result of an earlier reduction, and this is another rank.
  bool rank_zero_adds_it() const { return settings.reduction == GradientReduction::kSum && group.rank() != 0; }
  /// Whether a rank multiplies its buckets by its weight before they are summed.
  bool weights_buckets() const;
  /// The index of the plan's first parameter that is one of these; none if none.
  std::optional<size_t> first_of(const TensorSet& parameters) const;
  /// "bucket 1 of 2 (out.bias to second.weight)", with names cut to `longest_name`.
  std::string describe(size_t bucket, size_t longest_name = std::string::npos) const;

  struct Place {
    size_t bucket, slot;
  };

  Group group;
  ReductionSettings settings;
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
  std::vector<std::vector<size_t>> buckets;  ///< the parameters of each, by index, in the order of reduction
  std::vector<std::string> labels;           ///< of each bucket, for its collectives
  std::vector<Place> places;                 ///< of each parameter
  std::vector<int> rank_of_row;              ///< of each row in the table of facts: usually a rank has one
  std::string row_kind;                      ///< "virtual " if a rank has several rows
};

/// The virtual ranks of a run with several per rank; else null.
std::shared_ptr<VirtualRanks> several_virtual_ranks(const Group& group);

/// Clears every .grad.
void drop_gradients(const std::vector<at::Tensor>& tensors);
/// Whether no parameter has a nonzero gradient.
bool gradients_are_gone(const std::vector<at::Tensor>& tensors);

}  // namespace lockstep
