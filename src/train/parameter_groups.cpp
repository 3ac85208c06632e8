#include <lockstep/parameter_groups.h>

#include <set>

namespace lockstep {

using torch::optim::OptimizerParamGroup;

std::vector<OptimizerParamGroup> parameter_groups(const NamedTensors& parameters,
                                                  const std::vector<ParameterRule>& rules) {
  for (size_t i = 0; i < rules.size(); ++i) {
    TORCH_CHECK(rules[i].matches != nullptr, "parameter_groups: the rule `", rules[i].name, "` (number ", i,
                ") has no predicate; give it a function of a name and a parameter, such as is_bias_or_norm");
    TORCH_CHECK(rules[i].options != nullptr, "parameter_groups: the rule `", rules[i].name, "` (number ", i,
                ") has no options");
  }
  std::vector<std::vector<at::Tensor>> members(rules.size());
  std::set<const c10::TensorImpl*> seen;
  std::string problems;
  for (const auto& [name, parameter] : parameters) {
    if (!parameter.requires_grad() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    std::string matching;
    size_t matches = 0;
    for (size_t i = 0; i < rules.size(); ++i) {
      if (!rules[i].matches(name, parameter)) continue;
      matching += (matches++ == 0 ? "" : ", ") + rules[i].name;
      if (matches == 1) members[i].push_back(parameter);
    }
    if (matches == 0) problems += "\n  " + name + " matches no rule";
    if (matches > 1) problems += "\n  " + name + " matches several: " + matching;
  }
  for (size_t i = 0; i < rules.size(); ++i)
    if (members[i].empty()) problems += "\n  the rule `" + rules[i].name + "` matches no parameter";
  TORCH_CHECK(problems.empty(), "parameter_groups: each parameter must match exactly one rule:", problems);
  TORCH_CHECK(!rules.empty(), "parameter_groups: no parameter requires grad, or there are no rules");
  std::vector<OptimizerParamGroup> groups;
  for (size_t i = 0; i < rules.size(); ++i) groups.emplace_back(std::move(members[i]), rules[i].options->clone());
  return groups;
}

std::vector<OptimizerParamGroup> parameter_groups(const torch::nn::Module& module,
                                                  const std::vector<ParameterRule>& rules) {
  NamedTensors parameters;
  for (const auto& item : module.named_parameters()) parameters.emplace_back(item.key(), item.value());
  return parameter_groups(parameters, rules);
}

namespace detail {

void check_has_predicate(bool has_one) {
  TORCH_CHECK(has_one,
              "decay_groups: the rule `without decay` has no predicate; give it a function of a name and a parameter, "
              "such as is_bias_or_norm, or leave it out");
}

}  // namespace detail

bool is_bias_or_norm(const std::string& /*name*/, const at::Tensor& parameter) { return parameter.dim() <= 1; }

}  // namespace lockstep
