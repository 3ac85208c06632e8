#pragma once

#include <functional>
#include <memory>

#include <lockstep/group.h>
#include <lockstep/zero_redundancy_optimizer.h>

namespace lockstep::fully_sharded {

/// Steps this rank's parts as an optimizer of one process does, once all ranks have said that they take the same step.
class PartStep final : public detail::Stepper {
 public:
  struct Events {
    std::function<void()> before, after;  ///< every rank calls them
  };
  /// Every rank makes it. TORCH_CHECK fails for optimizers without kernels.
  PartStep(const Group& group, torch::optim::Optimizer& optimizer, const detail::StepKind& kind,
           const ZeroRedundancyOptions& options, Events events);

  void step() override;
  void check_state_is_known() const override { refuse_state(); }
  void complete_state() override { refuse_state(); }
  void move_to(torch::optim::Optimizer& optimizer) override;

 private:
  [[noreturn]] static void refuse_state();
  /// Throws on all ranks if some are about to do something else.
  void agree() const;
  void check_same(const std::string& kind, const std::string& lines) const;

  const Group group_;
  const detail::FormulaKind formula_;
  torch::optim::Optimizer* optimizer_;
  const std::unique_ptr<detail::Stepper> own_;
  const Events events_;
};

}  // namespace lockstep::fully_sharded
