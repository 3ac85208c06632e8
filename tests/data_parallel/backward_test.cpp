#include <gtest/gtest.h>

#include <optional>

#include <lockstep/checkpoint.h>
#include <lockstep/comm_hook.h>
#include <lockstep/distributed_data_parallel.h>
#include <torch/script.h>

#include "data_parallel/models.h"
#include "data_parallel/recompute.h"
#include "support/ranks.h"

// Which gradients a backward leaves, whatever the program calls. Expected: the mean of the gradients that the same
// program leaves when it runs alone, once for each rank.

namespace lockstep::backward_test {
namespace {

using namespace testing;  // NOLINT

class Backward : public ::testing::TestWithParam<Engine> {};
const Engine kEngines[] = {{1, ""}, {2, "shm"}, {3, "shm"}, {2, "gloo"}, {3, "gloo"}};
INSTANTIATE_TEST_SUITE_P(Engines, Backward, ::testing::ValuesIn(kEngines),
                         [](const auto& instance) { return name_of(instance.param); });

using Parameters = std::vector<at::Tensor>;

std::vector<at::Tensor> gradients_of(const Parameters& parameters) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters)
    gradients.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
  return gradients;
}

void forget_gradients(const Parameters& parameters) {
  for (auto parameter : parameters) parameter.mutable_grad() = at::Tensor();
}

void expect_equal(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].defined(), expected[i].defined()) << "gradient " << i;
    if (actual[i].defined()) {
      EXPECT_TRUE(at::allclose(actual[i], expected[i], 1e-12, 1e-14)) << "gradient " << i << "\n"
                                                                      << actual[i] << "\nexpected\n"
                                                                      << expected[i];
    }
  }
}

/// What `pass(model, rank)` leaves in .grad, run alone for each rank: the sum over ranks weighted by `share`.
template <typename ModelPointer>
std::vector<at::Tensor> alone(const ModelPointer& model, int world_size,
                              const std::function<void(const ModelPointer&, int rank)>& pass,
                              const std::function<double(int rank)>& share) {
  std::vector<at::Tensor> total;
  for (int rank = 0; rank < world_size; ++rank) {
    forget_gradients(model->parameters());
    pass(model, rank);
    auto gradients = gradients_of(model->parameters());
    if (total.empty()) total.resize(gradients.size());
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined()) continue;
      gradients[i] *= share(rank);
      total[i] = total[i].defined() ? total[i] + gradients[i] : gradients[i];
    }
  }
  return total;
}

/// `make()` builds the model in double; `pass` runs forwards and backwards. It is run `times` times on the replica;
/// each run must leave the mean of what every rank would leave alone.
template <typename Make>
void expect_mean(const Engine& engine, Make make, std::function<void(const decltype(make())&, int rank)> pass,
                 int times = 3) {
  run_ranks(engine, [&](Context& context) {
    auto model = make(), reference = make();
    const auto expected =
        alone<decltype(make())>(reference, context.world_size(), pass, [&](int) { return 1.0 / context.world_size(); });
    DistributedDataParallel replica(model, context, {.first_bucket_cap_mb = 1e-4, .bucket_cap_mb = 2e-4});
    for (int i = 0; i < times; ++i) {
      forget_gradients(model->parameters());
      pass(model, context.rank());
      expect_equal(gradients_of(model->parameters()), expected);
    }
  });
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
    register_module("out", out);
    fill(*this);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return out(torch::tanh(fc2(torch::tanh(fc1(x))))); }
  at::Tensor encode(const at::Tensor& x) { return torch::tanh(fc1(x)); }
  torch::nn::Linear fc1{6, 6}, fc2{6, 6}, out{6, 3};
};
TORCH_MODULE(Net);

std::shared_ptr<NetImpl> make_net() { return std::make_shared<NetImpl>(); }
Sample sample(int step, int rank) { return batch(step, rank, at::kDouble); }

using NetPass = std::function<void(const std::shared_ptr<NetImpl>&, int)>;

TEST_P(Backward, OfAnyMethodAndOfSeveralForwards) {
  expect_mean(GetParam(), make_net, NetPass([](const auto& net, int rank) {
                const at::Tensor one = net->encode(sample(0, rank).data).square().mean();
                const at::Tensor two = net->forward(sample(1, rank).data).square().mean();
                (one + two * net->forward(sample(2, rank).data).mean()).backward();
              }));
}

TEST_P(Backward, SeveralBeforeAStepAddUp) {
  expect_mean(GetParam(), make_net, NetPass([](const auto& net, int rank) {
                net->forward(sample(0, rank).data).square().mean().backward();
                net->encode(sample(1, rank).data).square().mean().backward();
                net->forward(sample(2, rank).data).square().mean().backward();
              }));
}

TEST_P(Backward, TwiceThroughOneGraph) {
  expect_mean(GetParam(), make_net, NetPass([](const auto& net, int rank) {
                const at::Tensor loss = net->forward(sample(0, rank).data).square().mean();
                loss.backward({}, /*retain_graph=*/true);
                loss.backward();
              }));
}

TEST_P(Backward, OfDifferentPartsOnEachRank) {
  expect_mean(GetParam(), make_net, NetPass([](const auto& net, int rank) {
                const at::Tensor x = sample(0, rank).data;
                (rank == 0 ? net->forward(x) : rank == 1 ? net->encode(x) : net->fc2(x)).square().mean().backward();
              }));
}

TEST_P(Backward, RestrictedToSomeParameters) {
  expect_mean(GetParam(), make_net, NetPass([](const auto& net, int rank) {
                const at::Tensor loss = net->forward(sample(0, rank).data).square().mean();
                loss.backward({}, /*retain_graph=*/false, /*create_graph=*/false,
                              std::vector<at::Tensor>{net->fc1->weight, net->out->bias});
              }));
}

TEST_P(Backward, WithAPenaltyOnGradientsOfTheInput) {
  expect_mean(GetParam(), make_net, NetPass([](const auto& net, int rank) {
                at::Tensor x = sample(0, rank).data.requires_grad_();
                const at::Tensor score = net->forward(x).sum();
                const at::Tensor slope = torch::autograd::grad({score}, {x}, {}, true, /*create_graph=*/true)[0];
                (score + slope.square().mean()).backward();
              }));
}

/// Recomputed is everything, the first or the last part, one part inside another, one layer in two parts.
void expect_mean_recomputed(const Engine& engine, const std::string& what) {
  expect_mean(engine, make_net, NetPass([what](const auto& net, int rank) {
                at::Tensor x = sample(0, rank).data.requires_grad_();
                Recompute::Segment all = [&](const at::Tensor& in) { return net->forward(in); };
                Recompute::Segment encode = [&](const at::Tensor& in) { return net->encode(in); };
                Recompute::Segment second = [&](const at::Tensor& in) { return torch::tanh(net->fc2(in)); };
                Recompute::Segment both = [&](const at::Tensor& in) {
                  return torch::tanh(net->fc2(recompute(encode, in)));
                };
                at::Tensor y;
                if (what == "all") y = recompute(all, x);
                if (what == "first") y = net->out(torch::tanh(net->fc2(recompute(encode, x))));
                if (what == "last") y = net->out(recompute(second, net->encode(x)));
                if (what == "inside") y = net->out(recompute(both, x));
                if (what == "shared") y = net->out(recompute(encode, recompute(second, recompute(encode, x))));
                if (what == "shared with the outer one") y = net->out(net->encode(recompute(encode, net->encode(x))));
                y.square().mean().backward();
              }));
}

TEST_P(Backward, Recomputed) {
  for (const char* what : {"all", "first", "last", "inside", "shared", "shared with the outer one"}) {
    SCOPED_TRACE(what);
    expect_mean_recomputed(GetParam(), what);
  }
}

TEST_P(Backward, RecomputedOnOneRankOnly) {
  expect_mean(GetParam(), make_net, NetPass([](const auto& net, int rank) {
                Recompute::Segment all = [&](const at::Tensor& in) { return net->forward(in); };
                const at::Tensor x = sample(0, rank).data.requires_grad_();
                (rank == 0 ? recompute(all, x) : net->forward(x)).square().mean().backward();
              }));
}

/// The nested backward is the first to produce gradients, and the outer one goes on after it: still one reduction.
TEST_P(Backward, RecomputedIsOnePass) {
  const NetPass pass = [](const auto& net, int rank) {
    Recompute::Segment second = [&](const at::Tensor& in) { return torch::tanh(net->fc2(in)); };
    const at::Tensor x = net->encode(sample(0, rank).data);
    (rank == 0 ? recompute(second, x) : second(x)).square().mean().backward();
  };
  expect_mean(GetParam(), make_net, pass);
  run_ranks(GetParam(), [&](Context& context) {
    auto net = make_net();
    DistributedDataParallel replica(net, context);
    const auto accumulation = replica.accumulate(2);
    for (int i = 1; i <= 4; ++i) {
      pass(net, context.rank());
      EXPECT_EQ(accumulation.complete(), i % 2 == 0);
    }
  });
}

struct NoGradient : torch::autograd::Function<NoGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*,
                                               torch::autograd::tensor_list gradients) {
    return {at::_efficientzerotensor(gradients[0].sizes(), gradients[0].options())};
  }
};

/// Zeros that autograd makes have no memory.
TEST_P(Backward, OfZerosWithoutMemory) {
  run_ranks(GetParam(), [](Context& context) {
    torch::nn::Linear net(2, 3);
    DistributedDataParallel replica(net, context);
    for (int step = 1; step <= 3; ++step) {
      (NoGradient::apply(net->weight).sum() + net->bias.sum()).backward();
      EXPECT_EQ(net->weight.grad().abs().sum().item<float>(), 0);
      EXPECT_EQ(net->bias.grad()[0].item<float>(), static_cast<float>(step == 3 ? 2 : 1));
      if (step == 1) net->zero_grad();
    }
  });
}

/// By then buckets are sent while backward runs, so gradients of the layer come after its bucket was sent.
TEST_P(Backward, RecomputedForTheFirstTimeLate) {
  run_ranks(GetParam(), [](Context& context) {
    for (const bool on_all : {true, false}) {
      auto net = make_net(), reference = make_net();
      DistributedDataParallel replica(net, context, {.first_bucket_cap_mb = 1e-5, .bucket_cap_mb = 1e-5});
      for (int step = 0; step < 4; ++step) {
        const NetPass pass = [&](const auto& model, int rank) {
          Recompute::Segment again = [&](const at::Tensor& x) {
            return torch::tanh(model->out(model->forward(x).repeat({1, 2})));
          };
          const at::Tensor x = sample(step, rank).data.requires_grad_();
          if (step < 2 || (rank > 0 && !on_all)) return model->forward(x).square().mean().backward();
          model->forward(recompute(again, x).repeat({1, 2})).square().mean().backward();
        };
        forget_gradients(net->parameters());
        pass(net, context.rank());
        expect_equal(gradients_of(net->parameters()),
                     alone<std::shared_ptr<NetImpl>>(reference, context.world_size(), pass,
                                                     [&](int) { return 1.0 / context.world_size(); }));
      }
    }
  });
}

TEST_P(Backward, OfTiedParameters) {
  struct Tied : torch::nn::Module {
    Tied() {
      register_module("in", in);
      register_module("again", in);
      register_module("out", out);
      out->weight = out->register_parameter("tied", in->weight);
      fill(*this);
      to(at::kDouble);
    }
    at::Tensor forward(const at::Tensor& x) { return torch::mm(torch::tanh(in(x)), out->weight); }
    torch::nn::Linear in{6, 6}, out{6, 6};
  };
  const auto make = [] { return std::make_shared<Tied>(); };
  expect_mean(GetParam(), make, std::function<void(const std::shared_ptr<Tied>&, int)>([](const auto& model, int rank) {
                model->forward(sample(0, rank).data).square().mean().backward();
              }));
}

TEST_P(Backward, OfATorchScriptModule) {
  run_ranks(GetParam(), [](Context& context) {
    const auto make = [] {
      torch::jit::Module module("scripted");
      module.register_parameter("weight", formula({6, 3}, 7), /*is_buffer=*/false);
      module.register_parameter("unused", formula({2}, 8), /*is_buffer=*/false);
      module.register_buffer("offset", formula({3}, 9));
      module.define(R"(
        def forward(self, x):
          return torch.mm(x, self.weight) + self.offset
        def other(self, x):
          return torch.mm(torch.tanh(x), self.weight)
      )");
      for (auto parameter : module.parameters()) parameter.requires_grad_();
      return module;
    };
    auto module = make(), reference = make();
    for (int rank = 0; rank < context.world_size(); ++rank) {
      const at::Tensor x = sample(0, rank).data;
      const at::Tensor loss = reference.forward({x}).toTensor().square().mean() +
                              reference.get_method("other")({x}).toTensor().square().mean();
      (loss / context.world_size()).backward();
    }
    if (context.rank() != 0) at::NoGradGuard(), module.attr("offset").toTensor().fill_(5);
    DistributedDataParallel replica(module, context);
    EXPECT_TRUE(at::equal(module.attr("offset").toTensor(), reference.attr("offset").toTensor()));
    const at::Tensor x = sample(0, context.rank()).data;
    (replica(std::vector<c10::IValue>{x}).toTensor().square().mean() +
     replica->get_method("other")({x}).toTensor().square().mean())
        .backward();
    EXPECT_TRUE(
        at::allclose(module.attr("weight").toTensor().grad(), reference.attr("weight").toTensor().grad(), 1e-5, 1e-6));
    EXPECT_FALSE(module.attr("unused").toTensor().grad().defined());
  });
}

TEST_P(Backward, OfAListOfParameters) {
  run_ranks(GetParam(), [](Context& context) {
    const at::Tensor a = (formula({4}, 1) + context.rank()).requires_grad_(), b = formula({4}, 2).requires_grad_();
    DistributedDataParallel replica(NamedTensors{{"a", a}, {"b", b}}, context);
    EXPECT_TRUE(at::equal(a, formula({4}, 1)));
    (a * b * (context.rank() + 1)).sum().backward();
    const double mean = (context.world_size() + 1) / 2.0;
    EXPECT_TRUE(at::allclose(a.grad(), b * mean, 1e-5, 1e-6));
    EXPECT_TRUE(at::allclose(b.grad(), a * mean, 1e-5, 1e-6));
  });
}

/// The identity, but its backward gives a gradient only to the input.
struct GivesNone : torch::autograd::Function<GivesNone> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x, const at::Tensor& parameter) {
    return x + parameter;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0], at::Tensor()};
  }
};

/// Autograd reaches such a parameter without a gradient. It once counted as used: its .grad was zeros or the old
/// values, so weight decay and momentum changed it, which they do not in one process.
TEST_P(Backward, WithoutAGradientIsNotReached) {
  run_ranks(GetParam(), [](Context& context) {
    const int last = context.world_size() - 1;
    for (const bool on_all : {true, false}) {
      const at::Tensor a = at::ones({3}).requires_grad_(), b = at::ones({3}).requires_grad_();
      DistributedDataParallel replica(NamedTensors{{"a", a}, {"b", b}}, context);
      torch::optim::SGD sgd({a, b}, torch::optim::SGDOptions(0.5).momentum(0.9).weight_decay(0.5));
      for (int step = 0; step < 3; ++step) {
        sgd.zero_grad();
        const bool gives = step == 0 || (!on_all && context.rank() == last);
        ((gives ? a + b : GivesNone::apply(a, b)) * 2).sum().backward();
        EXPECT_TRUE(at::equal(a.grad(), at::full({3}, 2)));
        const double share = step == 0 ? 1 : on_all ? 0 : 1.0 / context.world_size();
        ASSERT_EQ(b.grad().defined(), share > 0) << step;
        if (share > 0) {
          EXPECT_TRUE(at::allclose(b.grad(), at::full({3}, 2 * share)));
        }
        const at::Tensor before = b.detach().clone();
        sgd.step();
        EXPECT_EQ(at::equal(b, before), share == 0);
      }
    }
  });
}

/// The mean of N equal numbers may differ from them in the last bit, and a hook may lose much more.
TEST_P(Backward, LeavesTheBitsOfWhatNobodyReached) {
  run_ranks(GetParam(), [](Context& context) {
    for (const auto& hook : {CommHookPtr(), bf16_compress_hook(), power_sgd_hook({.start_iter = 0})})
      for (const auto reduction : {GradientReduction::kMean, GradientReduction::kSum, GradientReduction::kWeightedMean})
        for (const bool by_user : {false, true}) {
          const at::Tensor a = formula({40, 30}, 1).to(at::kFloat).requires_grad_();
          const at::Tensor b = formula({40, 30}, 2).to(at::kFloat).requires_grad_();
          DistributedDataParallel replica(NamedTensors{{"a", a}, {"b", b}}, context, {.reduction = reduction});
          replica.register_comm_hook(hook);
          if (reduction == GradientReduction::kWeightedMean) replica.set_weight(0.1 + context.rank());
          ((a + b) * formula({40, 30}, 3 + context.rank())).sum().backward();
          if (by_user) b.mutable_grad() = b.grad() / 3;  // a tensor of the user
          const at::Tensor kept = b.grad(), before = kept.clone();
          for (int step = 0; step < 3; ++step) {
            (a * formula({40, 30}, 5 + context.rank())).sum().backward();
            EXPECT_TRUE(b.grad().is_same(kept));
            EXPECT_TRUE(at::equal(b.grad(), before)) << step;
          }
        }
  });
}

/// In PyTorch the next backward makes a new tensor. Here it once overwrote the old one.
TEST_P(Backward, LeavesAGradientThatTheUserHasKept) {
  run_ranks(GetParam(), [](Context& context) {
    auto net = make_net();
    DistributedDataParallel replica(net, context);
    std::vector<at::Tensor> kept, expected;
    for (int step = 0; step < 4; ++step) {
      forget_gradients(net->parameters());
      const at::Tensor x = sample(step, context.rank()).data;
      (step == 2 ? net->encode(x) : net->forward(x)).square().mean().backward();  // no rank reaches `out` in one step
      for (const at::Tensor& parameter : net->parameters()) {
        if (!parameter.grad().defined()) continue;
        kept.push_back(parameter.grad());
        expected.push_back(parameter.grad().clone());
      }
      for (size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(at::equal(kept[i], expected[i])) << i << " in " << step;
    }
    // As in PyTorch: a tensor that is still .grad accumulates.
    net->forward(sample(4, context.rank()).data).square().mean().backward();
    EXPECT_TRUE(kept.back().is_same(net->out->bias.grad()));
    EXPECT_FALSE(at::equal(kept.back(), expected.back()));
  });
}

TEST_P(Backward, GuardsMoveAndEndInAnyOrder) {
  run_ranks(GetParam(), [](Context& context) {
    auto net = make_net();
    std::optional<NoSyncGuard> outlives;
    {
      DistributedDataParallel replica(net, context);
      const auto reduces = [&] {
        forget_gradients(net->parameters());
        net->forward(sample(0, context.rank()).data).square().mean().backward();
        const bool reduced = replica.accumulate(1).complete();
        if (!reduced) replica.reduce_gradients();
        return reduced;
      };
      std::optional<NoSyncGuard> guard;
      EXPECT_TRUE(reduces());
      guard = replica.no_sync();
      EXPECT_FALSE(reduces());
      guard = replica.no_sync();  // the new guard exists before the old one ends
      EXPECT_FALSE(reduces());
      std::optional<NoSyncGuard> other(std::move(*guard));
      guard.reset();
      EXPECT_FALSE(reduces());
      auto accumulation = std::make_optional(replica.accumulate(1));
      EXPECT_TRUE(reduces());
      other.reset();
      EXPECT_TRUE(reduces());
      accumulation.reset();
      EXPECT_TRUE(reduces());
      outlives = replica.no_sync();
    }
    outlives.reset();
  });
}

TEST_P(Backward, AccumulatesAndReducesEveryNth) {
  run_ranks(GetParam(), [](Context& context) {
    auto net = make_net(), reference = make_net();
    DistributedDataParallel replica(net, context, {.static_graph = true});
    const auto pass = [](const auto& model, int step, int rank) {
      (model->forward(sample(step, rank).data).square().mean() / 3).backward();
    };
    const auto accumulation = replica.accumulate(3);
    for (int step = 0; step < 9; ++step) {
      pass(net, step, context.rank());
      EXPECT_EQ(accumulation.complete(), step % 3 == 2);
      if (!accumulation.complete()) continue;
      const auto expected = alone<std::shared_ptr<NetImpl>>(
          reference, context.world_size(),
          [&](const auto& model, int rank) {
            for (int s = step - 2; s <= step; ++s) pass(model, s, rank);
          },
          [&](int) { return 1.0 / context.world_size(); });
      expect_equal(gradients_of(net->parameters()), expected);
      forget_gradients(net->parameters());
    }
    pass(net, 9, context.rank());  // the data ends within an accumulation
    EXPECT_FALSE(accumulation.complete());
    replica.reduce_gradients();
    EXPECT_TRUE(accumulation.complete());
    expect_equal(gradients_of(net->parameters()),
                 alone<std::shared_ptr<NetImpl>>(
                     reference, context.world_size(), [&](const auto& model, int rank) { pass(model, 9, rank); },
                     [&](int) { return 1.0 / context.world_size(); }));
  });
}

TEST_P(Backward, NoSyncKeepsGradientsLocalAndGradAllowed) {
  run_ranks(GetParam(), [](Context& context) {
    auto net = make_net(), reference = make_net();
    DistributedDataParallel replica(net, context);
    const auto loss = [&](const auto& model) { return model->forward(sample(0, context.rank()).data).square().mean(); };
    {
      const auto guard = replica.no_sync();
      loss(net).backward();
      loss(reference).backward();
      expect_equal(gradients_of(net->parameters()), gradients_of(reference->parameters()));
      const auto local = torch::autograd::grad({loss(net)}, {net->fc1->weight})[0];
      EXPECT_TRUE(at::allclose(local, reference->fc1->weight.grad(), 1e-5, 1e-6));
    }
    EXPECT_THROW(torch::autograd::grad({loss(net)}, {net->fc1->weight}), c10::Error);
  });
}

TEST_P(Backward, SumsCountWhatWasReducedOnce) {
  run_ranks(GetParam(), [](Context& context) {
    auto net = make_net(), reference = make_net();
    DistributedDataParallel replica(net, context, {.reduction = GradientReduction::kSum});
    const NetPass pass = [](const auto& model, int rank) {
      model->forward(sample(0, rank).data).square().mean().backward();
      model->encode(sample(1, rank).data).square().mean().backward();  // `out` and fc2 keep their gradients
      model->forward(sample(2, rank).data).square().mean().backward();
    };
    const auto expected =
        alone<std::shared_ptr<NetImpl>>(reference, context.world_size(), pass, [](int) { return 1.0; });
    for (int i = 0; i < 3; ++i) {
      for (auto& parameter : net->parameters())
        if (i == 2) parameter.mutable_grad().zero_();
      if (i == 1) forget_gradients(net->parameters());
      pass(net, context.rank());
      expect_equal(gradients_of(net->parameters()), expected);
    }
  });
}

TEST_P(Backward, WeightedBySamplesIsTheMeanOverAllSamples) {
  run_ranks(GetParam(), [](Context& context) {
    for (const int empty : {-1, context.world_size() - 1}) {  // or a rank without samples
      auto net = make_net(), reference = make_net();
      DistributedDataParallel replica(net, context, {.reduction = GradientReduction::kWeightedMean});
      const auto samples = [&](int rank) { return rank == empty ? 0 : 3 + 2 * rank; };
      const auto data = [&](int rank) { return batch(0, rank, at::kDouble, samples(rank)).data; };
      std::vector<at::Tensor> whole;
      for (int rank = 0; rank < context.world_size(); ++rank) whole.push_back(data(rank));
      if (context.world_size() == 1 && empty == 0) continue;
      reference->forward(at::cat(whole)).square().mean().backward();
      replica.set_weight(samples(context.rank()));
      net->forward(data(context.rank())).square().mean().backward();  // NaN on the rank without samples
      expect_equal(gradients_of(net->parameters()), gradients_of(reference->parameters()));
    }
  });
}

TEST_P(Backward, LeavesGradientsAt64Bytes) {
  run_ranks(GetParam(), [](Context& context) {
    for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16}) {
      torch::nn::Sequential net(torch::nn::Linear(6, 9), torch::nn::Tanh(), torch::nn::Linear(9, 3),
                                torch::nn::Linear(3, 1));
      net->to(type);
      DistributedDataParallel model(net, context);
      for (int step = 0; step < 2; ++step) {
        model(batch(step, context.rank(), type).data).square().mean().backward();
        for (const at::Tensor& parameter : net->parameters())
          EXPECT_EQ(reinterpret_cast<uintptr_t>(parameter.grad().const_data_ptr()) % 64, 0u)
              << parameter.sizes() << " of " << type;
        net->zero_grad(step == 0);
      }
    }
  });
}

TEST_P(Backward, DelayedAndIgnoredParameters) {
  run_ranks(GetParam(), [](Context& context) {
    auto net = make_net(), reference = make_net();
    at::NoGradGuard(), net->fc2->bias.fill_(context.rank());
    DistributedDataParallel replica(net, context,
                                    {.first_bucket_cap_mb = 1e-6,
                                     .bucket_cap_mb = 1e-6,
                                     .delay_all_reduce_named_params = {"out.weight"},
                                     .parameters_to_ignore = {"fc2.bias"}});
    EXPECT_EQ(net->fc2->bias[0].item<double>(), context.rank());
    if (context.world_size() > 1) {
      EXPECT_EQ(replica.bucket_parameters().back(), std::vector<std::string>{"out.weight"});
      EXPECT_EQ(replica.bucket_parameters().size(), 5u);
    }
    net->forward(sample(0, context.rank()).data).square().mean().backward();
    const auto ignored = context.group().all_gather(net->fc2->bias.grad());
    EXPECT_EQ(at::equal(ignored[0], ignored[context.world_size() - 1]), context.world_size() == 1);
    const auto followed = context.group().all_gather(net->out->weight.grad());
    EXPECT_TRUE(at::equal(followed[0], followed[context.world_size() - 1]));
  });
}

}  // namespace
}  // namespace lockstep::backward_test
