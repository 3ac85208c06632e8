#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <lockstep/diloco.h>
#include <lockstep/state_dict.h>

#include "diloco/fragment.h"
#include "diloco/machines.h"

namespace lockstep::diloco {

/// A fragment with this rank's slice of its outer copy, of the outer optimizer's state, and of what rounding lost.
/// Further ranks of a large machine own none of it.
class OuterFragment {
 public:
  /// Every rank makes it. The outer copy becomes what machine 0's parameters are.
  OuterFragment(Fragment fragment, const Machines& machines, const DiLoCoOptions& options);

  const Fragment& fragment() const { return fragment_; }
  /// Why the outer optimizer could not be made; empty: it was.
  const std::string& problem() const { return problem_; }
  /// Describes the outer optimizer, as it must be on all ranks.
  /// REQUIRES: it was made.
  std::string describe() const;
  std::string kind_of_optimizer() const;

  /// Returns what this machine sends: the outer copy minus its parameters, plus what was lost before. Undefined on a
  /// rank without a slice.
  at::Tensor pseudo_gradient(const Machines& machines) const;
  /// The outer optimizer's step by the mean of the pseudo-gradients. On ranks with a slice.
  void step(const at::Tensor& mean);
  /// Of this rank's slice of the outer copy; 0 without one.
  uint64_t hash() const;
  /// All slices of the outer copy. Every rank of the machine calls it.
  at::Tensor whole(const Machines& machines) const;
  /// The parameters minus the outer copy. Every rank of the machine calls it.
  at::Tensor learned(const Machines& machines) const;
  /// The parameters become the outer copy plus `learned`. Every rank of the machine calls it.
  void move(const Machines& machines, const at::Tensor& learned) const;

  /// This rank's slice of the outer copy; undefined on a rank without one.
  const at::Tensor& copy() const { return copy_; }
  /// Rounding errors of this machine's pseudo-gradient, and of the means that this rank has sent; undefined without
  /// error feedback.
  const at::Tensor& rest() const { return rest_; }
  const at::Tensor& mean_rest() const { return mean_rest_; }

  /// The numbers of a slice.
  int64_t slice() const { return slice_; }
  /// The step in which the fragment was last sent; 0: it was not.
  int64_t sent_at() const { return sent_at_; }
  void set_sent_at(int64_t step) { sent_at_ = step; }

  StateDict state_dict() const;
  /// Throws Error, and changes nothing, if the state has other slices.
  void check(const StateDict& state) const;
  void load_state_dict(const StateDict& state);

 private:
  Fragment fragment_;
  int64_t slice_ = 0;
  at::Tensor copy_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::string problem_;
  at::Tensor rest_, mean_rest_;
  int64_t sent_at_ = 0;
};

/// Throws on all ranks, by name, if some could not make their outer optimizers. Every rank of `group` calls it.
void check_made(const Group& group, const std::vector<OuterFragment>& fragments);

}  // namespace lockstep::diloco
