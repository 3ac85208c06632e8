#include <memory>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "checkpoint/master_state.h"
#include "optim/formula.h"
#include "optim/step_plan.h"

namespace lockstep::detail {
namespace {

using State = std::unique_ptr<torch::optim::OptimizerParamState>;

/// While it lives, masters replace the 16-bit parameters that have a gradient: in an optimizer's groups, with the
/// gradient in float, and in its map.
class Masters {
 public:
  Masters(torch::optim::Optimizer& optimizer, const Formula& formula) : optimizer_(optimizer), formula_(formula) {
    for (auto& group : optimizer.param_groups())
      for (at::Tensor& place : group.params())
        if (optim::is_16_bit(place.scalar_type()) && place.grad().defined()) exchange(place);
  }
  ~Masters() {
    for (One& one : all_) give_back(one);
  }
  Masters(const Masters&) = delete;
  Masters& operator=(const Masters&) = delete;

  void round() const {
    for (const One& one : all_) one.parameter.copy_(one.master);
  }

 private:
  struct One {
    at::Tensor* place;  ///< in the groups
    at::Tensor parameter, master;
    State state;  ///< set if the optimizer's step would take it for a state that it has begun
  };

  void exchange(at::Tensor& place) {
    One one{.place = &place, .parameter = place, .master = {}, .state = take(place)};
    if (auto* known = dynamic_cast<Master*>(one.state.get())) one.master = known->master_param;
    one.master = one.master.defined() ? optim::laid_out(one.master, at::kFloat, place)
                                      : at::zeros_like(place, place.options().dtype(at::kFloat).requires_grad(false));
    // If the master does not round to the parameter, other code has written the parameter, and the parameter counts.
    const at::Tensor is_current = one.master.to(place.scalar_type()).eq(place);
    one.master.copy_(at::where(is_current, one.master, place.to(at::kFloat)));
    one.master.mutable_grad() = place.grad().to(at::kFloat);
    // SGD without momentum leaves only the master, from which LibTorch's step would read a momentum.
    if (one.state && formula_.array(*one.state, 0).defined())
      optimizer_.state()[one.master.unsafeGetTensorImpl()] = std::move(one.state);
    place = one.master;
    all_.push_back(std::move(one));
  }

  void give_back(One& one) {
    *one.place = one.parameter;
    one.master.mutable_grad().reset();
    if (State stepped = take(one.master)) one.state = std::move(stepped);
    if (!one.state) one.state = formula_.new_state(/*with_master=*/true);
    if (dynamic_cast<Master*>(one.state.get()) == nullptr) one.state = formula_.with_master(*one.state);
    dynamic_cast<Master&>(*one.state).master_param = one.master;
    optimizer_.state()[one.parameter.unsafeGetTensorImpl()] = std::move(one.state);
  }

  /// Takes the state of a tensor from the optimizer's map, if there is any.
  State take(const at::Tensor& tensor) {
    const auto found = optimizer_.state().find(tensor.unsafeGetTensorImpl());
    if (found == optimizer_.state().end()) return nullptr;
    State state = std::move(found->second);
    optimizer_.state().erase(found);
    return state;
  }

  torch::optim::Optimizer& optimizer_;
  const Formula& formula_;
  std::vector<One> all_;
};

}  // namespace

void step_on_masters(torch::optim::Optimizer& optimizer, FormulaKind kind, const std::function<void()>& own_step) {
  const at::NoGradGuard no_grad;
  const Masters masters(optimizer, formula_of(kind));
  own_step();
  masters.round();
}

}  // namespace lockstep::detail
