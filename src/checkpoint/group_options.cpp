#include <lockstep/group_options.h>

#include <string>
#include <string_view>

#include <c10/util/Type.h>

namespace lockstep::detail {
namespace {

std::string readable(const std::type_info& type) {
  std::string name = c10::demangle(type.name());
  constexpr std::string_view kSpace = "torch::optim::";
  if (name.starts_with(kSpace)) name.erase(0, kSpace.size());
  return name;
}

}  // namespace

void check_group_options(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                         const torch::optim::OptimizerOptions& wanted, const std::type_info& optimizer) {
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto& parameters = groups[i].params();
    for (size_t p = 0; p < parameters.size(); ++p)
      TORCH_CHECK(parameters[p].defined(), readable(optimizer), ": parameter ", p, " of group ", i,
                  " is an undefined tensor; give the optimizer those that the model has");
    if (!groups[i].has_options()) continue;
    const torch::optim::OptimizerOptions& given = groups[i].options();
    TORCH_CHECK(typeid(given) == typeid(wanted), "group ", i, " has ", readable(typeid(given)), ", but ",
                readable(optimizer), " takes ", readable(typeid(wanted)), "; give the group options of this optimizer");
  }
}

}  // namespace lockstep::detail
