#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <torch/nn/module.h>

#include "collectives/sharded_parameters.h"
#include "fully_sharded/unit.h"

namespace lockstep::fully_sharded {

/// Finds edits by the program: of the module, parameters, parts and their gradients.
class EditCheck {
 public:
  /// The findings of a walk through the module.
  struct Walk {
    std::string lines;  ///< must be the same on all ranks: identify the model, and what was frozen or edited
    std::vector<Unit::Parameter*> trained;  ///< as trained()
  };

  /// `model` is its number among the group's models.
  /// REQUIRES: the units have been made.
  EditCheck(std::shared_ptr<torch::nn::Module> module, std::deque<Unit>& units, int model);

  /// The parameters that the model trains, in the order of the module.
  std::vector<Unit::Parameter*> trained() const;
  /// TORCH_CHECK fails if the module did not have the tensor when the model was made.
  Unit::Parameter& parameter_of(const at::Tensor& tensor) const;

  /// TORCH_CHECK fails if other code than the library has changed a parameter or a part.
  void check_unchanged() const;
  /// check_unchanged(), including edits of the module. Walks through the module.
  void check_module();
  /// The findings of the last check_module().
  const Walk& walk() const { return walk_; }
  /// Describes gradients that other code than the library has changed between the last backward and `call`; empty if
  /// none.
  std::string trouble_of_gradients(const std::string& call) const;
  /// A parameter with a gradient that no optimizer steps; empty if none.
  std::string trouble_of_unstepped() const;

 private:
  Walk walk_through() const;

  const std::shared_ptr<torch::nn::Module> module_;
  std::deque<Unit>& units_;
  const int model_;
  std::unordered_map<const c10::TensorImpl*, Unit::Parameter*> parameters_;
  std::optional<ShardedParameters> claim_;
  Walk walk_;
};

}  // namespace lockstep::fully_sharded
