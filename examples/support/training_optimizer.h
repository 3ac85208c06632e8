#pragma once

#include <memory>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "training_options.h"

// The optimizer that --optimizer and --sharded ask for.

namespace training_optimizer {

template <typename Optimizer, typename Model, typename OptimizerOptions>
std::unique_ptr<torch::optim::Optimizer> make_as(Model& model, const TrainingOptions& options,
                                                 const OptimizerOptions& how) {
  if (!options.is_sharded()) return std::make_unique<Optimizer>(model->parameters(), how);
  return std::make_unique<lockstep::ZeroRedundancyOptimizer<Optimizer>>(
      model, how, lockstep::ZeroRedundancyOptions{.shared_parameters = options.sharded == "shared"});
}

template <typename Model>
std::unique_ptr<torch::optim::Optimizer> make(Model& model, const TrainingOptions& options) {
  using namespace torch::optim;
  const double lr = options.peak_lr();
  if (options.is_adamw()) return make_as<AdamW>(model, options, AdamWOptions(lr).weight_decay(0.01));
  return make_as<SGD>(model, options, SGDOptions(lr).momentum(0.9).weight_decay(5e-4));
}

}  // namespace training_optimizer
