#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/group.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "collectives/call_place.h"
#include "fully_sharded/part_states.h"

namespace lockstep::fully_sharded {

/// Steps this rank's parts as an optimizer of one process does, once all ranks have announced the same step.
class PartStep final : public detail::Stepper {
 public:
  struct Events {
    std::function<std::string()> trouble;    ///< the reason why this rank cannot step; empty: it can
    std::function<void()> after;             ///< called by every rank
    std::function<CallPlace::Call()> place;  ///< the place of a stepping rank, for the others
    std::function<std::string()> describe;   ///< describes the model, in lines that must be the same on all ranks
    std::shared_ptr<void> token;             ///< held as there is one optimizer only
  };
  /// TORCH_CHECK fails for optimizers without kernels.
  /// REQUIRES: every rank makes it.
  PartStep(std::shared_ptr<const MachineGroups> groups, torch::optim::Optimizer& optimizer,
           const detail::StepKind& kind, const ZeroRedundancyOptions& options, Events events,
           PartStates::Places places);

  void step() override;
  void complete_state() override;
  const Group* slice_holders() const override { return &group_; }
  bool is_never_whole() const override { return true; }
  bool adopts_state() const override { return true; }
  void show_slices() override { states_.show(*optimizer_); }
  at::IntArrayRef sizes_of(const at::Tensor& parameter) const override { return states_.sizes_of(parameter); }
  std::pair<int64_t, int64_t> elements_to_load(const at::Tensor& parameter, const at::Tensor& value) const override {
    return states_.elements_to_load(parameter, value);
  }
  void move_to(torch::optim::Optimizer& optimizer) override;

 private:
  /// Throws on all ranks if some cannot step, or are about to do something different.
  void agree();
  std::string trouble() const;
  std::string intended() const;
  /// Throws if the ranks' lines differ.
  static void refuse_difference(const std::string& kind, const std::vector<std::string>& said);

  const Group group_;
  const detail::FormulaKind formula_;
  torch::optim::Optimizer* optimizer_;
  const std::unique_ptr<detail::Stepper> own_;
  const Events events_;
  PartStates states_;
};

}  // namespace lockstep::fully_sharded
