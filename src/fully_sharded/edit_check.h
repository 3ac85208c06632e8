#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <torch/nn/module.h>

#include "fully_sharded/unit.h"
#include "reducer/sharded_parameters.h"

namespace lockstep::fully_sharded {

/// Finds what a program has edited by itself: the module, parameters, parts and their gradients.
class EditCheck {
 public:
  /// What a walk through the module finds.
  struct Walk {
    std::string lines;  ///< that must be the same on all ranks: which model it is, and what was frozen or edited
    std::vector<Unit::Parameter*> trained;  ///< as trained()
  };

  /// `model`: its number among the group's models. The units have been made.
  EditCheck(std::shared_ptr<torch::nn::Module> module, std::deque<Unit>& units, int model);

  /// What the model trains, in the order of the module.
  std::vector<Unit::Parameter*> trained() const;
  /// TORCH_CHECK fails if the module did not have it when the model was made.
  Unit::Parameter& parameter_of(const at::Tensor& tensor) const;

  /// TORCH_CHECK fails if something else than the library has changed a parameter or a part.
  void check_unchanged() const;
  /// The same, also for a module that was edited. Walks through it.
  void check_module();
  /// Of the last check_module().
  const Walk& walk() const { return walk_; }
  /// What is wrong if something else than the library has changed gradients between the last backward and `call`; empty
  /// if nothing has.
  std::string trouble_of_gradients(const std::string& call) const;
  /// A parameter that has a gradient and that no optimizer steps; empty if there is none.
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
