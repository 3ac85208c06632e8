#pragma once

#include <exception>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "support/golden_message.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

// One rank's side of programs that use an optimizer of several ranks incorrectly.

namespace lockstep::wrong_optimizers_test {

using namespace testing;  // NOLINT
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return out(torch::tanh(fc(x))); }
  torch::nn::Linear fc{register_module("fc", torch::nn::Linear(6, 4))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(4, 3))};
};
TORCH_MODULE(Net);

/// Two parameters of one size.
struct TwinsImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return (x * p + q).sum(); }
  at::Tensor p{register_parameter("p", at::ones({5}))};
  at::Tensor q{register_parameter("q", at::zeros({5}))};
};
TORCH_MODULE(Twins);

/// What a user has written.
class Plain : public torch::optim::Optimizer {
 public:
  explicit Plain(const std::vector<OptimizerParamGroup>& groups, torch::optim::SGDOptions defaults)
      : Optimizer(groups, std::make_unique<torch::optim::SGDOptions>(defaults)) {}
  at::Tensor step(LossClosure closure = nullptr) override {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(closure);
    for (auto& group : param_groups())
      for (at::Tensor& parameter : group.params())
        if (parameter.grad().defined()) parameter.sub_(parameter.grad(), group.options().get_lr());
    return {};
  }
};

/// With tensors of its own.
inline StateDict copies_of(const torch::nn::Module& module) {
  StateDict copies;
  for (const auto& item : state_dict(module)) copies.insert(item.key(), item.value().detach().clone());
  return copies;
}

using Model = DistributedDataParallel<Net>;
using AdamW = ZeroRedundancyOptimizer<torch::optim::AdamW>;
using Groups = std::vector<OptimizerParamGroup>;

/// One rank's side of a wrong program.
struct Wrong {
  explicit Wrong(Context& the_context) : context(the_context), model(net, the_context) {}

  void backward() { model(at::ones({2, 6}, net->fc->weight.options())).square().mean().backward(); }
  static Twins twins() { return Twins(); }
  AdamW optimizer(ZeroRedundancyOptions options = {}) const { return AdamW(model, AdamWOptions(0.1), options); }
  /// Makes an optimizer and a step, then `spoil`s something and steps again.
  void spoil_step(const std::function<void(AdamW&)>& spoil, ZeroRedundancyOptions options = {}) {
    AdamW adamw = optimizer(options);
    backward();
    adamw.step();
    adamw.zero_grad();
    backward();
    before = net->out->weight.detach().clone();
    spoil(adamw);
    adamw.step();
  }

  void halve() {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : net->parameters()) parameter.mul_(0.5);
  }
  /// All ranks change what may be one memory, while none is in a backward.
  void change_everywhere(const std::function<void()>& change) {
    context.group().barrier();
    change();
    context.group().barrier();
    before = net->out->weight.detach().clone();
  }
  void halve_everywhere() {
    change_everywhere([&] {
      const at::NoGradGuard no_grad;
      for (const at::Tensor& parameter : net->parameters()) parameter.mul_(0.5);
    });
  }
  void step_everywhere(torch::optim::Optimizer& other) {
    change_everywhere([&] { other.step(); });
  }
  /// A step by the right optimizer, and one by another, which LibTorch's SGD takes without counting a version.
  void step_also_by_sgd(torch::optim::Optimizer& right) {
    torch::optim::SGD sgd(net->parameters(), 0.1);
    backward();
    right.step();
    step_everywhere(sgd);
    sgd.zero_grad();
    backward();
  }

  /// Two steps of an optimizer that is not the one made from the model.
  void train_by(torch::optim::Optimizer& other, bool in_a_thread = false) {
    const auto train = [&] {
      backward();
      step_everywhere(other);
      other.zero_grad();
      backward();
    };
    if (!in_a_thread) return train();
    std::exception_ptr thrown;
    std::thread([&] {
      try {
        train();
      } catch (...) {
        thrown = std::current_exception();
      }
    }).join();
    if (thrown) std::rethrow_exception(thrown);
  }
  /// A step of an optimizer of which the library knows nothing, after `spoil`.
  void spoil_unknown(const std::function<void(torch::optim::Optimizer&)>& spoil) {
    ZeroRedundancyOptimizer<Plain> plain(model, torch::optim::SGDOptions(0.1));
    spoil(plain);
    backward();
    before = net->out->weight.detach().clone();
    plain.step();
  }

  Context& context;
  Net net;
  const bool odd = context.rank() == context.world_size() - 1;  ///< the last rank is the one that differs
  Model model;
  const TemporaryFolder folder{};
  at::Tensor before;  ///< what the refused step must leave alone; undefined: there was none
};

using Program = std::function<void(Wrong&)>;
using Programs = std::map<std::string, Program>;

struct Case {
  std::string name;
  Engine engine;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.name << " " << name_of(c.engine); }
};

/// Expects that the program ends on every rank with its message, and steps no parameter.
inline void expect_refused(const Case& one, const Program& program) {
  const auto body = [&](Context& context) {
    Wrong side(context);
    context.group().barrier();
    expect_golden_message("tests/optim/wrong_optimizers.txt", one.name, one.engine, context.rank(),
                          [&] { program(side); });
    if (side.before.defined()) {
      EXPECT_TRUE(side.net->out->weight.equal(side.before)) << "a refused step has stepped";
    }
  };
  // The timeout is long, so no error is found by waiting for it.
  run_ranks(one.engine.world_size, body, std::chrono::seconds(30),
            {.collective_timeout = std::chrono::seconds(25), .backend = one.engine.backend, .announce = false});
}

}  // namespace lockstep::wrong_optimizers_test
