#include "reducer/operation_kind.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace lockstep {
namespace {

/// Doubles its input, as an operation of a program may.
struct Doubled : torch::autograd::Function<Doubled> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& input) { return 2 * input; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {2 * gradients.front()};
  }
};

OperationKind kind(const at::Tensor& result) { return kind_of(result.grad_fn()->name()); }

TEST(OperationKindTest, NamesOfAutograd) {
  const at::Tensor x = at::ones({2, 2}).requires_grad_(), y = at::ones({2, 2}).requires_grad_();
  for (const at::Tensor& linear : {-x, x.sum(), x.mean(), x.view({4}), x[0], x.t(), x.clone(), x.to(at::kDouble),
                                   x.expand({3, 2, 2}), at::zeros({2, 2}).copy_(x)})
    EXPECT_EQ(kind(linear), OperationKind::kLinear) << linear.grad_fn()->name();
  for (const at::Tensor& join : {at::cat({x, y}), at::stack({x, y}), at::lerp(x, y, 0.5), at::where(x > 0, x, y)})
    EXPECT_EQ(kind(join), OperationKind::kJoin) << join.grad_fn()->name();
  for (const at::Tensor& sum : {x + y, x - y, x + 1, 1 - x})
    EXPECT_EQ(kind(sum), OperationKind::kSum) << sum.grad_fn()->name();
  for (const at::Tensor& kinked : {x.abs(), at::relu(x), std::get<0>(x.max(1)), x.norm(), at::maximum(x, y)})
    EXPECT_EQ(kind(kinked), OperationKind::kKinked) << kinked.grad_fn()->name();
  EXPECT_EQ(kind(at::addcmul(x, y, y)), OperationKind::kAddedProduct);
  EXPECT_EQ(kind(at::addcdiv(x, y, y)), OperationKind::kAddedQuotient);
  for (const at::Tensor& product : {x * y, x * 2, at::mm(x, y), at::dot(x[0], y[0])})
    EXPECT_EQ(kind(product), OperationKind::kProduct) << product.grad_fn()->name();
  EXPECT_EQ(kind(x / y), OperationKind::kQuotient);
  for (const at::Tensor& added :
       {at::addmm(x, x, y), at::addmv(x[0], x, y[0]), at::addr(x, x[0], y[0]),
        at::baddbmm(x[0].view({1, 1, 2}), x.view({1, 2, 2}).narrow(1, 0, 1), y.view({1, 2, 2}))})
    EXPECT_EQ(kind(added), OperationKind::kAddedProduct) << added.grad_fn()->name();
  EXPECT_EQ(kind(at::conv1d(x.view({1, 2, 2}), y.view({2, 2, 1}), x[0])), OperationKind::kBiasedProduct);
  EXPECT_EQ(kind_of("ConvolutionBackwardBackward0"), OperationKind::kProduct);
  for (const at::Tensor& other : {x.pow(2), x.square(), x.exp(), x.log(), x.sqrt(), x.sigmoid(), x.clamp(0, 1),
                                  x.softmax(0), x.logsumexp(0), x.reciprocal(), x.var()})
    EXPECT_EQ(kind(other), OperationKind::kNonlinear) << other.grad_fn()->name();
  EXPECT_EQ(kind(Doubled::apply(x)), OperationKind::kUnknown);
  EXPECT_EQ(kind_of("DoubledBackward"), OperationKind::kUnknown);  // of Python
}

}  // namespace
}  // namespace lockstep
