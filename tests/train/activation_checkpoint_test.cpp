// Calls that backward makes again, beside the same without: the same bits, and less memory.

#include <lockstep/activation_checkpoint.h>

#include <functional>

#include <gtest/gtest.h>
#include <lockstep/autocast.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/grad_scaler.h>
#include <lockstep/sync_batch_norm.h>
#include <lockstep/zero_redundancy_optimizer.h>
#include <torch/torch.h>

#include "data_parallel/models.h"
#include "support/complaint.h"
#include "support/ranks.h"

namespace lockstep::activation_checkpoint_test {
namespace {

using namespace testing;  // NOLINT

/// A layer with all that a second call must repeat.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(bool norm = true) {
    if (norm) bn = register_module("bn", torch::nn::BatchNorm1d(6));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = torch::tanh(fc1->forward(x));
    seen.emplace_back(y.getIntrusivePtr());
    if (bn) y = bn->forward(y);
    return dropout->forward(fc2->forward(y)) + x;
  }
  torch::nn::Linear fc1{register_module("fc1", torch::nn::Linear(6, 6))};
  torch::nn::Linear fc2{register_module("fc2", torch::nn::Linear(6, 6))};
  torch::nn::Dropout dropout{register_module("dropout", torch::nn::Dropout(0.3))};
  torch::nn::BatchNorm1d bn{nullptr};
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> seen;  ///< activations
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  explicit NetImpl(bool norm = true) {
    for (int i = 0; i < 3; ++i) blocks->push_back(Block(norm));
  }
  /// `again`: by checkpoint().
  at::Tensor forward(at::Tensor x, bool again) {
    for (const auto& layer : *blocks) {
      const auto block = std::dynamic_pointer_cast<BlockImpl>(layer);
      x = again ? checkpoint(block, x) : block->forward(x);
    }
    return out(x);
  }
  torch::nn::ModuleList blocks{register_module("blocks", torch::nn::ModuleList())};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(6, 3))};
};
TORCH_MODULE(Net);

Net made(bool norm = true) {
  Net net(norm);
  fill(*net);
  return net;
}

/// Gradients and buffers after passes by `pass`, which get the same random numbers.
std::vector<at::Tensor> left_by(torch::nn::Module& module, const std::function<at::Tensor(int step)>& pass) {
  torch::manual_seed(7);
  std::vector<at::Tensor> all;
  for (int step = 0; step < 2; ++step) {
    const at::Tensor loss = pass(step);
    loss.backward();
    all.push_back(loss.detach());
  }
  all.push_back(at::rand({3}));  // the generator is where it would be
  for (const at::Tensor& parameter : module.parameters())
    all.push_back(parameter.grad().defined() ? parameter.grad() : at::empty({0}));
  for (const at::Tensor& buffer : module.buffers()) all.push_back(buffer);
  return all;
}

void expect_same(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i)
    EXPECT_TRUE(at::equal(actual[i], expected[i])) << "tensor " << i << "\n" << actual[i] << "\n" << expected[i];
}

at::Tensor input(int step) { return batch(step, 0).data; }

TEST(ActivationCheckpoint, HasTheBitsOfPlainCalls) {
  Net plain = made(), again = made();
  const auto pass = [](Net net, bool is_again) {
    return [net, is_again](int step) mutable { return net->forward(input(step), is_again).square().sum(); };
  };
  expect_same(left_by(*again, pass(again, true)), left_by(*plain, pass(plain, false)));
}

TEST(ActivationCheckpoint, InputsGetTheirGradients) {
  Block block(false);
  const auto gradients = [&](bool is_again) {
    torch::manual_seed(1);
    const at::Tensor x = input(0).requires_grad_(), y = (x * 2).tanh();
    (is_again ? checkpoint(block, y) : block.ptr()->forward(y)).square().sum().backward();
    return x.grad();
  };
  EXPECT_TRUE(at::equal(gradients(true), gradients(false)));
}

TEST(ActivationCheckpoint, OfFunctionsOfSeveralThings) {
  torch::nn::Linear linear(6, 6);
  auto function = [linear](const at::Tensor& x, int power, const at::Tensor& none, const at::Tensor& y) mutable {
    EXPECT_FALSE(none.defined());
    const at::Tensor z = linear->forward(x) * y;
    return std::tuple(z.pow(power), z.argmax(), (z + y).tanh(), x * 3);
  };
  const auto gradients = [&](bool is_again) {
    linear->zero_grad();
    const at::Tensor x = input(0).requires_grad_(), y = input(1).requires_grad_();
    const auto [a, b, c, d] = is_again ? checkpoint(function, x, 3, at::Tensor(), y) : function(x, 3, {}, y);
    EXPECT_EQ(b.scalar_type(), at::kLong);
    (a.sum() + c.square().sum()).backward();  // one is left out
    return std::vector{x.grad(), y.grad(), linear->weight.grad(), linear->bias.grad()};
  };
  expect_same(gradients(true), gradients(false));
}

TEST(ActivationCheckpoint, Nested) {
  Net plain = made(/*norm=*/false), nested = made(/*norm=*/false);
  const auto inner = [nested](const at::Tensor& x) { return nested.ptr()->forward(x, true); };
  const auto outer = [inner](const at::Tensor& x) { return checkpoint(inner, x) * 2; };
  expect_same(left_by(*nested, [&](int step) { return checkpoint(outer, input(step)).square().sum(); }),
              left_by(*plain, [&](int step) { return (plain->forward(input(step), false) * 2).square().sum(); }));
}

TEST(ActivationCheckpoint, OfPartsOfASequence) {
  const auto loss_of = [](Net net, int segments) {
    torch::nn::Sequential layers;
    for (const auto& layer : *net->blocks) layers->push_back(std::dynamic_pointer_cast<BlockImpl>(layer));
    return [net, layers, segments](int step) mutable {
      return net->out(checkpoint_sequential(layers, segments, input(step))).square().sum();
    };
  };
  Net plain = made();
  const auto expected = left_by(*plain, [&](int step) { return plain->forward(input(step), false).square().sum(); });
  for (const int segments : {1, 2, 3}) {
    Net cut = made();
    expect_same(left_by(*cut, loss_of(cut, segments)), expected);
  }
}

TEST(ActivationCheckpoint, CheckpointedLayersAreLayers) {
  torch::nn::Sequential plain(torch::nn::Linear(6, 6), Block(), torch::nn::Linear(6, 2)),
      again(torch::nn::Linear(6, 6), Checkpointed<Block>(), Checkpointed<torch::nn::Linear>(6, 2));
  fill(*plain);
  fill(*again);
  ASSERT_EQ(again->named_parameters().keys(), plain->named_parameters().keys());
  const auto pass = [](torch::nn::Sequential layers) {
    return [layers](int step) mutable { return layers->forward(input(step)).square().sum(); };
  };
  expect_same(left_by(*again, pass(again)), left_by(*plain, pass(plain)));
}

TEST(ActivationCheckpoint, CastsAsTheFirstCallDid) {
  Net plain = made(), again = made();
  const auto pass = [](Net net, bool is_again) {
    return [net, is_again](int step) mutable {
      const auto bf16 = autocast();
      return net->forward(input(step), is_again).square().sum();
    };
  };
  expect_same(left_by(*again, pass(again, true)), left_by(*plain, pass(plain, false)));
}

TEST(ActivationCheckpoint, CastsOfTheFirstCallAreNotUsedByOthers) {
  Block block(false);
  const auto bf16 = autocast();
  const at::Tensor loss = checkpoint(block, input(0)).sum();
  block->fc1(input(1)).sum().backward();
  EXPECT_TRUE(block->fc1->weight.grad().defined());
  loss.backward();
}

/// A layer whose forward uses a buffer and changes it.
struct CountingImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    calls += 1;
    return linear->forward(x) * calls.clone();
  }
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(6, 6))};
  at::Tensor calls{register_buffer("calls", at::zeros({}))};
};
TORCH_MODULE(Counting);

TEST(ActivationCheckpoint, BuffersAreWhatTheyWereInTheFirstCall) {
  const auto left = [](bool is_again) {
    Counting counting;
    fill(*counting);
    at::Tensor loss;
    for (int step = 0; step < 3; ++step) {  // a backward of several calls
      const at::Tensor x = input(step), y = is_again ? checkpoint(counting, x) : counting->forward(x);
      loss = loss.defined() ? loss + y.square().sum() : y.square().sum();
    }
    loss.backward();
    EXPECT_EQ(counting->calls.item<float>(), 3);
    return std::vector{counting->linear->weight.grad(), counting->linear->bias.grad()};
  };
  expect_same(left(true), left(false));
}

TEST(ActivationCheckpoint, WhatAFunctionReadsMayBeUsedElsewhere) {
  torch::nn::Linear first(6, 6), second(6, 6);
  const auto gradients = [&](bool is_again) {
    first->zero_grad();
    second->zero_grad();
    const at::Tensor skip = torch::tanh(first(input(0)));  // as in a U-Net
    auto up = [second, skip](const at::Tensor& x) mutable { return torch::tanh(second(x) * skip); };
    const at::Tensor x = torch::relu(skip), y = is_again ? checkpoint(up, x) : up(x),
                     z = is_again ? checkpoint(up, y) : up(y);
    (z.square().sum() + (skip * y).sum()).backward();
    return std::vector{first->weight.grad(), first->bias.grad(), second->weight.grad()};
  };
  const auto again = gradients(true), plain = gradients(false);
  for (size_t i = 0; i < again.size(); ++i) EXPECT_TRUE(at::allclose(again[i], plain[i], 1e-5, 1e-6)) << i;
}

TEST(ActivationCheckpoint, OfResultsOfManyShapes) {
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(6, 4));
  const auto gradient = [&](bool is_again) {
    lstm->zero_grad();
    const at::Tensor x = input(0).unsqueeze(1);
    const auto [out, state] = is_again ? checkpoint(lstm, x) : lstm->forward(x);
    (out.sum() + std::get<1>(state).square().sum()).backward();
    return lstm->parameters().front().grad();
  };
  EXPECT_TRUE(at::allclose(gradient(true), gradient(false), 1e-5, 1e-6));
  const auto of_pair = [](const at::Tensor& x) { return std::pair(x * 2, at::Tensor()); };
  const auto [twice, none] = checkpoint(of_pair, input(0).requires_grad_());
  EXPECT_TRUE(twice.requires_grad() && !none.defined());
  twice.sum().backward();
}

TEST(ActivationCheckpoint, WhatTakesNoGradientIsAPlainCall) {
  Block frozen;
  for (const at::Tensor& parameter : frozen->parameters()) parameter.set_requires_grad(false);
  EXPECT_FALSE(checkpoint(frozen, input(0)).requires_grad());
}

TEST(ActivationCheckpoint, KeepsOnlyInputs) {
  Net net = made();
  const auto alive = [&](bool is_again) {
    const at::Tensor loss = net.ptr()->forward(input(0), is_again).sum();
    size_t count = 0;
    for (const auto& layer : *net->blocks)
      for (auto& one : std::exchange(layer->as<BlockImpl>()->seen, {})) count += one.expired() ? 0 : 1;
    loss.backward();
    return count;
  };
  EXPECT_EQ(alive(false), 3);
  EXPECT_EQ(alive(true), 0);
}

TEST(ActivationCheckpoint, GradientsOfWhatComesAfterACallMayBeAskedFor) {
  Block block;
  const at::Tensor y = checkpoint(block, input(0)) * 2, loss = y.square().sum();
  EXPECT_TRUE(at::equal(torch::autograd::grad({loss}, {y}).front(), 2 * y));
}

TEST(ActivationCheckpoint, IsAPlainCallWithoutGradMode) {
  Block block;
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(checkpoint(block, input(0)).requires_grad());
  EXPECT_EQ(block->seen.size(), 1);
}

TEST(ActivationCheckpoint, RefusesWhatWouldBeWrong) {
  Block block;
  const auto loss_of = [&] { return checkpoint(block, input(0).requires_grad_()).sum(); };
  const auto says = [](const std::string& expected, const std::function<void()>& body) {
    const std::string said = complaint(body);
    EXPECT_NE(said.find(expected), std::string::npos) << said;
  };
  says("autograd::grad() and backward(inputs)", [&] {
    const at::Tensor x = input(0).requires_grad_(), y = x * 2;
    torch::autograd::grad({checkpoint(block, y).sum()}, {x});
  });
  says("autograd::grad() and backward(inputs)", [&] { torch::autograd::grad({loss_of()}, {block->fc1->weight}); });
  says("autograd::grad() and backward(inputs)",
       [&] { loss_of().backward({}, std::nullopt, false, at::TensorList({block->fc1->weight})); });
  says("backward(create_graph)", [&] { loss_of().backward({}, std::nullopt, /*create_graph=*/true); });
  says("switched between train() and eval()", [&] {
    const at::Tensor loss = loss_of();
    block->dropout->eval();
    loss.backward();
  });
  says("parameter fc1.weight was changed after the call", [&] {
    const at::Tensor loss = loss_of();
    const torch::NoGradGuard no_grad;
    block->fc1->weight.mul_(2);
    loss.backward();
  });
  says("the second call, in backward, returned Float [4, 6], and the first Float [4, 3]; ", [&] {
    auto calls = std::make_shared<int>(0);
    const auto other = [calls](const at::Tensor& x) { return x.narrow(1, 0, ++*calls == 1 ? 3 : 6) * 2; };
    checkpoint(other, input(0).requires_grad_()).sum().backward();
  });
  says("has been modified by an inplace operation", [&] {
    const at::Tensor x = input(0).requires_grad_() * 1, loss = checkpoint(block, x).sum();
    x.mul_(2);
    loss.backward();
  });
  says("the module is empty", [&] { checkpoint(Block(nullptr), input(0)); });
  says("3 segments of 2 layers", [&] {
    checkpoint_sequential(torch::nn::Sequential(torch::nn::Linear(6, 6), torch::nn::Linear(6, 6)), 3, input(0));
  });
}

TEST(ActivationCheckpoint, SecondCallsThatWouldComputeSomethingElse) {
  const auto says = [](const std::string& expected, const std::function<void()>& body) {
    const std::string said = complaint(body);
    EXPECT_NE(said.find(expected), std::string::npos) << said;
  };
  constexpr const char *kOther =
                           "the second call, in backward, returned other values than the first, in tensor 0 of 1, ",
                       *kInPlace = "the function changes an input in place";
  Block block(false);
  torch::optim::SGD sgd(block->parameters(), 0.1);
  torch::optim::AdamW adamw(block->parameters(), torch::optim::AdamWOptions(0.01));
  for (const at::Tensor& parameter : block->parameters()) parameter.mutable_grad() = at::ones_like(parameter);
  const auto of_function = [block](const at::Tensor& x) mutable { return block(x); };
  says("parameter fc1.weight was changed after the call", [&] {  // around autograd's versions
    const at::Tensor loss = checkpoint(block, input(0)).sum();
    sgd.step();
    loss.backward();
  });
  for (torch::optim::Optimizer* optimizer :
       {static_cast<torch::optim::Optimizer*>(&sgd), static_cast<torch::optim::Optimizer*>(&adamw)})
    says(kOther, [&] {
      const at::Tensor loss = checkpoint(of_function, input(0)).sum();
      optimizer->step();
      loss.backward();
    });
  says(kOther, [&] {
    const at::Tensor loss = checkpoint(of_function, input(0)).sum();
    block->eval();
    loss.backward();
  });
  block->train();
  says("or given other layers", [&] {
    torch::nn::Sequential layers(torch::nn::Linear(6, 6));
    const at::Tensor loss = checkpoint(layers, input(0)).sum();
    layers->replace_module("0", torch::nn::Linear(6, 6).ptr());
    loss.backward();
  });
  says("buffer calls was changed after the call", [&] {
    const auto still = std::make_shared<torch::nn::BatchNorm1dImpl>(6);
    still->eval();
    still->register_buffer("calls", at::zeros({}));
    const at::Tensor loss = checkpoint(still, input(0).requires_grad_()).sum();
    still->named_buffers()["calls"].add_(1);
    loss.backward();
  });
  says(kOther, [&] {
    const auto calls = std::make_shared<int>(0);
    checkpoint([calls](const at::Tensor& x) { return x * ++*calls; }, input(0).requires_grad_()).sum().backward();
  });
  says(kInPlace, [&] {
    checkpoint([block](const at::Tensor& x) mutable { return block(x.sub_(1)); }, input(0)).sum().backward();
  });
  says(kInPlace, [&] {
    torch::nn::Sequential layers(torch::nn::ReLU(torch::nn::ReLUOptions(true)), torch::nn::Linear(6, 6));
    checkpoint(layers, torch::tanh(input(0).requires_grad_())).sum().backward();
  });
}

class CheckpointedReplicas : public ::testing::TestWithParam<Engine> {};
INSTANTIATE_TEST_SUITE_P(Engines, CheckpointedReplicas,
                         ::testing::Values(Engine{2, "shm"}, Engine{3, "shm"}, Engine{2, "gloo"}, Engine{3, "gloo"}),
                         [](const auto& instance) { return name_of(instance.param); });

/// The weights and buffers after steps of a replica, some of them of two passes, by a sharded optimizer and a scaler.
std::vector<at::Tensor> trained(Context& context, bool is_again, bool synchronized) {
  Net net = made();
  if (synchronized) convert_sync_batchnorm(*net, context.group());
  for (const auto& module : net->modules())
    if (auto* const layer = dynamic_cast<torch::nn::DropoutImpl*>(module.get())) layer->options.p(0.1);
  DistributedDataParallel model(net, context);
  ZeroRedundancyOptimizer optimizer(model, torch::optim::AdamWOptions(0.01));
  GradScaler scaler({.init_scale = 1024});
  torch::manual_seed(5 + context.rank());
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    const auto pass = [&](int number) {
      const at::Tensor loss = model(batch(step * 2 + number, context.rank()).data, is_again).square().mean();
      scaler.scale(loss).backward();
    };
    if (step % 2 == 0) {
      pass(0);
    } else {
      const auto accumulation = model.accumulate(2);
      pass(0);
      pass(1);
    }
    EXPECT_TRUE(scaler.step(optimizer));
    scaler.update();
  }
  model.check_divergence();
  std::vector<at::Tensor> all;
  for (const at::Tensor& tensor : net->parameters()) all.push_back(tensor.detach());
  for (const at::Tensor& tensor : net->buffers()) all.push_back(tensor);
  return all;
}

TEST_P(CheckpointedReplicas, TrainAsPlainOnesDo) {
  run_ranks(GetParam(), [](Context& context) {
    for (const bool synchronized : {false, true})
      expect_same(trained(context, true, synchronized), trained(context, false, synchronized));
  });
}

}  // namespace
}  // namespace lockstep::activation_checkpoint_test
