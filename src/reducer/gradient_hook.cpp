#include "reducer/gradient_hook.h"

#include <memory>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

namespace lockstep {

using torch::autograd::variable_list;

GradientHook::GradientHook(const at::Tensor& parameter, std::function<void()> on_gradient) {
  TORCH_CHECK(parameter.requires_grad() && parameter.is_leaf(),
              "gradients can be followed only for leaf tensors that "
              "require grad");
  accumulator_ = torch::autograd::impl::grad_accumulator(parameter);
  key_ = accumulator_->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
      [on_gradient = std::move(on_gradient)](const variable_list& outputs, const variable_list&) {
        on_gradient();
        return outputs;
      }));
}

GradientHook::~GradientHook() { accumulator_->del_post_hook(key_); }

void at_end_of_backward(std::function<void()> function) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(function));
}

int current_backward() { return torch::autograd::get_current_graph_task_id(); }

}  // namespace lockstep
