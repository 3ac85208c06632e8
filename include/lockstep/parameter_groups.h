#pragma once

#include <functional>
#include <memory>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <lockstep/group_options.h>
#include <lockstep/named_tensors.h>

namespace lockstep {

/// Whether a parameter, given with its name in the module, belongs to a set.
using ParameterPredicate = std::function<bool(const std::string& name, const at::Tensor& parameter)>;

/// Selects the parameters of a group, with the options of that group.
struct ParameterRule {
  template <typename Options>
  ParameterRule(std::string rule_name, ParameterPredicate predicate, const Options& group_options)
      : name(std::move(rule_name)),
        matches(std::move(predicate)),
        options(std::make_shared<const Options>(group_options)) {}

  std::string name;  ///< for messages
  ParameterPredicate matches;
  std::shared_ptr<const torch::optim::OptimizerOptions> options;
};

/// One parameter group per rule, in the order of the rules; parameters keep their order in the module. Parameters that
/// do not require grad are left out, and a parameter with several names is taken once, under the first. TORCH_CHECK
/// fails, listing all of them, if parameters match no rule or several, or if a rule matches none. Every rank gets the
/// same groups from the same module.
std::vector<torch::optim::OptimizerParamGroup> parameter_groups(const NamedTensors& parameters,
                                                                const std::vector<ParameterRule>& rules);
std::vector<torch::optim::OptimizerParamGroup> parameter_groups(const torch::nn::Module& module,
                                                                const std::vector<ParameterRule>& rules);

/// Biases and the weights of norms: parameters of at most one dimension (timm's rule).
bool is_bias_or_norm(const std::string& name, const at::Tensor& parameter);

namespace detail {
void check_has_predicate(bool has_one);
}  // namespace detail

/// An optimizer whose groups have exactly their given options; groups without options get `defaults`. TORCH_CHECK fails
/// for options of another optimizer.
///
///     const auto options = torch::optim::AdamWOptions(1e-3).weight_decay(0.05);
///     auto optimizer = lockstep::make_optimizer<torch::optim::AdamW>(lockstep::decay_groups(*net, options), options);
///
/// (From LibTorch 2.13 on, the optimizers' constructors treat an option that equals its type's default as not given and
/// replace it by the optimizer's own: a weight_decay of 0 becomes the optimizer's.)
template <typename Optimizer, typename Options>
Optimizer make_optimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups, const Options& defaults) {
  std::vector<torch::optim::OptimizerParamGroup> bare;
  for (const auto& group : groups) bare.emplace_back(group.params());
  Optimizer optimizer(bare, defaults);
  detail::check_group_options(groups, optimizer.defaults(), typeid(Optimizer));
  for (size_t i = 0; i < groups.size(); ++i)
    if (groups[i].has_options()) optimizer.param_groups()[i].set_options(groups[i].options().clone());
  return optimizer;
}

/// Two groups: parameters with `options`, and those that are `without_decay` with options.weight_decay(0). A group
/// that would be empty is left out.
template <typename Options>
std::vector<torch::optim::OptimizerParamGroup> decay_groups(const torch::nn::Module& module, const Options& options,
                                                            const ParameterPredicate& without_decay = is_bias_or_norm) {
  detail::check_has_predicate(without_decay != nullptr);
  Options none = options;
  none.weight_decay(0);
  std::vector<ParameterRule> rules;
  bool some = false, others = false;
  for (const auto& item : module.named_parameters()) {
    if (!item.value().requires_grad()) continue;
    (without_decay(item.key(), item.value()) ? others : some) = true;
  }
  if (some) rules.emplace_back("with decay", std::not_fn(without_decay), options);
  if (others) rules.emplace_back("without decay", without_decay, none);
  return parameter_groups(module, rules);
}

}  // namespace lockstep
