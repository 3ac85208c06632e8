#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::jit {
struct Module;
}

namespace lockstep {

/// A batch norm that can be converted.
struct FoundLayer {
  std::string name;
  at::Tensor running_mean, weight;  ///< one of them may be undefined
  std::function<bool()> is_training;

  /// The tensor that is looked up first.
  const at::Tensor& known() const { return running_mean.defined() ? running_mean : weight; }
};

/// The batch norms of a module.
struct FoundLayers {
  std::vector<FoundLayer> layers;
  std::string problems;  ///< one line for each layer that cannot be converted

  void add(FoundLayer layer);
};

/// Changes nothing in the module.
FoundLayers find_layers(const torch::jit::Module& module);

/// Makes the module's methods run as written from now on, without the executor's optimizations.
void run_as_written(const torch::jit::Module& module);

}  // namespace lockstep
