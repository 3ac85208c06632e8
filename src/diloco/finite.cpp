#include "diloco/finite.h"

#include <algorithm>
#include <sstream>

#include <ATen/ATen.h>

#include "base/text.h"
#include "collectives/coalesced.h"
#include "rank_page/operation_label.h"

namespace lockstep::diloco {
namespace {

bool are_finite(const at::Tensor& numbers) {
  if (numbers.numel() == 0) return true;
  const auto [least, most] = at::aminmax(numbers);  // NaN if there is one
  return at::isfinite(least).item<bool>() && at::isfinite(most).item<bool>();
}

}  // namespace

std::optional<size_t> first_not_finite(const std::vector<at::Tensor>& parameters, const at::Tensor& outer) {
  int64_t offset = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor numbers = outer.narrow(0, offset, parameters[i].numel());
    offset += parameters[i].numel();
    if (!are_finite(numbers.to(parameters[i].scalar_type()).to(at::kFloat))) return i;
  }
  return std::nullopt;
}

std::string outer_problem(const std::string& parameter, int64_t step, const DiLoCoOptions& options,
                          const Machines& machines) {
  if (step == 0)
    return "DiLoCo: parameter " + parameter + " of " + machines.name_of_first_rank(0) +
           " is not finite, and all machines would begin with it; initialise the model on that rank";
  std::ostringstream text;
  text << "DiLoCo: the outer copy of parameter " << parameter << " is not finite after the round that ended in step "
       << step << ", so no machine can continue from it; ";
  if (options.outer_optimizer)
    text << "let outer_optimizer make smaller steps";
  else
    text << "outer_lr is " << options.outer_lr << " and outer_momentum " << options.outer_momentum
         << ": give less, such as 0.7 and 0.9";
  text << ", and resume from a checkpoint, or start anew";
  return text.str();
}

std::string EmptyRounds::note(size_t fragment, int64_t round, bool is_empty, int64_t most) {
  std::vector<int64_t>& rounds = of_fragment[fragment];
  is_empty ? rounds.push_back(round) : rounds.clear();
  if (std::ssize(rounds) < most) return "";
  std::string list;
  for (const int64_t one : rounds) list += (list.empty() ? "" : one == round ? " and " : ", ") + std::to_string(one);
  return "DiLoCo: the parameters of all machines were not finite in " +
         counted(std::ssize(rounds), "round", "rounds in a row") + ", " + list +
         ", so nothing is learned any more, and max_nonfinite_rounds is " + std::to_string(rounds.size()) +
         "; lower the learning rate, clip gradients, or give the model NonFinitePolicy::kSkip, and resume from an "
         "earlier checkpoint, or start anew";
}

void average_finite_buffers(const Machines& machines, const NamedTensors& buffers) {
  std::vector<at::Tensor> numbers;
  for (const auto& [name, buffer] : buffers)
    if (buffer.is_floating_point() || buffer.is_complex()) numbers.push_back(buffer);
  if (numbers.empty() || machines.count() == 1) return;
  const OperationLabel label("the buffers of a DiLoCo");
  const bool is_finite = std::all_of(numbers.begin(), numbers.end(),
                                     [](const at::Tensor& buffer) { return at::isfinite(buffer).all().item<bool>(); });
  const at::Tensor told = machines.all().all_gather(at::scalar_tensor(is_finite ? 1 : 0, at::kLong));
  int taking_part = 0;
  for (int machine = 0; machine < machines.count(); ++machine)
    if (told[machines.first_rank(machine)].item<int64_t>() != 0)
      ++taking_part;
    else
      machines.warn_of(machine, "was left out of the average of the buffers, some of which are not finite");
  if (taking_part == 0) return;
  const bool takes_part = machines.here().rank() == 0 && is_finite;
  if (!is_finite)
    for (const at::Tensor& buffer : numbers) buffer.zero_();  // no part of NaN is nothing
  average_coalesced(machines.all(), numbers, takes_part ? 1.0 / taking_part : 0);
}

}  // namespace lockstep::diloco
