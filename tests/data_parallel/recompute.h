#pragma once

#include <functional>

#include <torch/torch.h>

namespace lockstep::testing {

/// Activation recomputation: the segment runs without a graph in forward, and again within backward, where it runs a
/// nested backward.
class Recompute : public torch::autograd::Function<Recompute> {
 public:
  using Segment = std::function<at::Tensor(const at::Tensor&)>;

  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input, Segment* segment) {
    context->save_for_backward({input});
    context->saved_data["segment"] = reinterpret_cast<int64_t>(segment);
    return (*segment)(input);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    at::Tensor input = context->get_saved_variables()[0].detach().requires_grad_();
    auto* segment = reinterpret_cast<Segment*>(context->saved_data["segment"].toInt());
    {
      const at::AutoGradMode with_graph(true);
      (*segment)(input).backward(gradients[0]);
    }
    return {input.grad(), at::Tensor()};
  }
};

/// `input` must require grad, as for PyTorch's reentrant checkpoint; `segment` must live until backward is over.
inline at::Tensor recompute(Recompute::Segment& segment, const at::Tensor& input) {
  return Recompute::apply(input, &segment);
}

}  // namespace lockstep::testing
