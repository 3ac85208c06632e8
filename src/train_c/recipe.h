#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <lockstep/checkpointer.h>
#include <lockstep/diloco.h>
#include <lockstep/schedule.h>

#include "train_c/settings.h"

namespace lockstep::train_c {

/// The loss of a module's outputs against targets. Throws LOCKSTEP_INVALID_ARGUMENT.
using Loss = std::function<at::Tensor(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& targets)>;

/// What the configuration says, apart from the optimizer, which needs parameters.
struct Recipe {
  Loss loss;
  bool loss_is_module = false;  ///< the module's output is the loss, and targets are further inputs
  bool is_sum = false;          ///< the loss is a sum over samples, not a mean
  bool weight_by_rows = false;
  std::optional<Schedule> schedule{};
  std::optional<at::ScalarType> dtype{};
  int accumulate = 1;
  std::optional<double> max_grad_norm{};
  int check_equal_every = 0;
  std::optional<DiLoCoOptions> diloco{};  ///< none: gradients are reduced over all ranks
  CheckpointerOptions checkpoints{};
  std::string log{};  ///< folder; empty: no log
};

/// These throw LOCKSTEP_INVALID_ARGUMENT, naming the entry.
Recipe recipe_of(Settings& settings);
/// If the parameters are not those that the recipe's DiLoCo can synchronise.
void check_diloco(const Settings& settings, const Recipe& recipe, const std::vector<at::Tensor>& parameters);
std::unique_ptr<torch::optim::Optimizer> optimizer_of(Settings& settings, std::vector<at::Tensor> parameters);

/// Sets the loss, and what belongs to it, from the entry `loss`. Throws LOCKSTEP_INVALID_ARGUMENT.
void choose_loss(Settings& settings, Recipe& recipe);

}  // namespace lockstep::train_c
