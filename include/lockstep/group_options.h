#pragma once

#include <lockstep/cxx20.h>

#include <type_traits>
#include <typeinfo>
#include <vector>

#include <torch/optim/optimizer.h>

namespace lockstep::detail {

/// TORCH_CHECK fails, naming the group, if one has an undefined tensor or the options of another optimizer. `optimizer`
/// takes options of the type of `wanted`, and would read others as if they were its own.
void check_group_options(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                         const torch::optim::OptimizerOptions& wanted, const std::type_info& optimizer);

/// Returns the groups after the part of that check that needs no optimizer.
template <typename Optimizer, typename Options>
const std::vector<torch::optim::OptimizerParamGroup>& checked_groups(
    const std::vector<torch::optim::OptimizerParamGroup>& groups, const Options& defaults) {
  if constexpr (std::is_base_of_v<torch::optim::OptimizerOptions, Options>)
    check_group_options(groups, defaults, typeid(Optimizer));
  return groups;
}

}  // namespace lockstep::detail
