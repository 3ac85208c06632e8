// Programs that would train with wrong numbers, or never end: each is told what is wrong. And what is not wrong, though
// it looks so.

#include <lockstep/fully_sharded_data_parallel.h>

#include <gtest/gtest.h>
#include <lockstep/checkpoint.h>
#include <lockstep/grad_scaler.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "fully_sharded/small_gpt.h"
#include "support/complaint.h"

namespace lockstep::wrong_fully_sharded_test {
namespace {

using namespace testing;  // NOLINT
using torch::optim::SGDOptions;

const Engine kMachines{2, "hierarchical", "ab"}, kOneMachine{2, "shm"};

void expect(const std::string& said, const std::string& words) {
  EXPECT_NE(said.find(words), std::string::npos) << "it says: " << said;
}

/// What a rank is told, by either kind of error.
std::string told(const std::function<void()>& body) {
  try {
    return complaint(body);
  } catch (const Error& error) {
    return error.what();
  }
}

/// A model of two machines that can train.
struct Training {
  explicit Training(const Context& context) : model(net, context), optimizer(model, SGDOptions(0.1)) {}
  at::Tensor loss(int step) {
    const at::Tensor text = text_of(step, 0);
    return loss_of(model(text), text);
  }
  SmallGpt net{3};
  FullyShardedDataParallel<SmallGpt> model;
  ZeroRedundancyOptimizer<torch::optim::SGD> optimizer;
};

TEST(WrongFullySharded, AParameterReadOutsideOfItsUnit) {
  run_alike(kMachines, [](Context& context) {
    Training training(context);
    const at::Tensor weight = training.net->parameters()[3];
    for (int again = 0; again < 2; ++again) {
      const std::string words = "a parameter of `layers.0` is not gathered";
      expect(told([&] { (void)(weight + 1); }), words);
      expect(told([&] { (void)weight.sum().item<float>(); }), words);
      expect(told([&] { (void)weight.detach().clone(); }), words);
      expect(told([&] { (void)weight.const_data_ptr(); }), words);
      expect(told([&] { torch::nn::init::zeros_(weight); }), words);
      expect(told([&] { (void)hash(state_dict(*training.net)); }), words);
      training.loss(0).backward();
      training.optimizer.step();
    }
    EXPECT_TRUE(training.net->head->weight.sum().isfinite().item<bool>()) << "what is in no unit can be read";
  });
}

TEST(WrongFullySharded, AModelThatIsGone) {
  run_alike(kMachines, [](Context& context) {
    SmallGpt net(3);
    at::Tensor loss;
    {
      FullyShardedDataParallel model(net, context);
      loss = loss_of(model(text_of(0, 0)), text_of(0, 0));
    }
    expect(told([&] { (void)net->forward(text_of(0, 0)); }), "was destroyed with the FullyShardedDataParallel");
    EXPECT_FALSE(told([&] { loss.backward(); }).empty());
    EXPECT_TRUE(net->head->weight.sum().isfinite().item<bool>());
  });
  run_alike(kOneMachine, [](Context& context) {
    SmallGpt net(3), plain(3);
    { const FullyShardedDataParallel model(net, context); }
    EXPECT_EQ(hash(state_dict(*net)), hash(state_dict(*plain)));
  });
}

TEST(WrongFullySharded, AUnitThatIsCalledTwice) {
  for (const Engine& engine : {kMachines, kOneMachine})
    run_alike(engine, [](Context& context) {
      Training training(context);
      const at::Tensor first = training.loss(0);
      expect(told([&] { (void)training.loss(1); }), "`layers.0` was called a second time");
      first.backward();
      training.optimizer.step();
      { (void)training.loss(1); }  // its graph goes at once: nobody can run a backward
      training.loss(2).backward();
      training.optimizer.step();
    });
}

TEST(WrongFullySharded, ABackwardThatGoesTwice) {
  run_alike(kMachines, [](Context& context) {
    Training training(context);
    const at::Tensor loss = training.loss(0);
    loss.backward({}, /*retain_graph=*/true);
    expect(told([&] { loss.backward(); }), "a second time (retain_graph)");
    expect(told([&] { (void)training.loss(0); }), "a backward failed halfway");
  });
}

TEST(WrongFullySharded, RanksThatCallDifferentUnits) {
  for (const Engine& engine : {kMachines, Engine{4, "hierarchical", "aabb"}, Engine{2, "gloo"}})
    run_alike(engine, [](Context& context) {
      Training training(context);
      training.loss(0).backward();
      training.optimizer.step();
      const at::Tensor x = at::ones({2, SmallGptImpl::kWidth});
      const size_t odd = context.rank() == context.world_size() - 1 ? 1 : 0;
      const std::string said = told([&] {
        const torch::NoGradGuard no_grad;
        (void)training.net->layers->at<detail::Unit<BlockImpl>>(odd).forward(x);
      });
      if (context.world_size() == 2) {
        expect(said, "the ranks use different units");
        expect(said, "the forward of `layers.0`");
        expect(said, "the forward of `layers.1`");
      } else {
        EXPECT_FALSE(said.empty());
      }
    });
}

TEST(WrongFullySharded, AnOptimizerOfTheModule) {
  run_alike(kMachines, [](Context& context) {
    SmallGpt net(3);
    FullyShardedDataParallel model(net, context);
    torch::optim::SGD optimizer(net->parameters(), SGDOptions(0.1));
    expect(told([&] { loss_of(model(text_of(0, 0)), text_of(0, 0)).backward(); }), "no optimizer steps its parts");
  });
}

TEST(WrongFullySharded, StepsThatDiffer) {
  run_alike(kMachines, [](Context& context) {
    Training training(context);
    training.loss(0).backward();
    if (context.rank() == 1) static_cast<SGDOptions&>(training.optimizer.param_groups()[0].options()).lr(0.2);
    expect(told([&] { training.optimizer.step(); }), "the ranks are about to take different steps");
  });
}

TEST(WrongFullySharded, AParameterThatIsChanged) {
  for (const Engine& engine : {kMachines, kOneMachine})
    run_alike(engine, [](Context& context) {
      for (const bool set : {false, true}) {
        Training training(context);
        const at::Tensor bias = training.net->head->bias;
        const at::NoGradGuard no_grad;
        SCOPED_TRACE(set ? "other memory" : "other values");
        if (set)
          bias.set_data(bias.clone());
        else
          bias.add_(1);
        const std::string words = "head.bias was changed by something other than the optimizer";
        expect(told([&] { training.optimizer.step(); }), words);
        SCOPED_TRACE("state_dict");
        expect(told([&] { (void)training.model.state_dict(); }), words);
        SCOPED_TRACE("backward");
        const at::AutoGradMode grad(true);
        expect(told([&] { training.loss(0).backward(); }), words);
      }
    });
}

TEST(WrongFullySharded, GradientsThatOneRankKeeps) {
  for (const Engine& engine : {kMachines, kOneMachine})
    run_alike(engine, [](Context& context) {
      Training training(context);
      training.loss(0).backward();
      training.optimizer.step();
      if (context.rank() == 1) training.optimizer.zero_grad();
      expect(told([&] { training.loss(1).backward(); }),
             "some ranks had gradients of earlier ones and others had none");
    });
}

TEST(WrongFullySharded, StateThatIsNotWhole) {
  run_alike(kMachines, [](Context& context) {
    Training training(context);
    training.loss(0).backward();
    training.optimizer.step();
    expect(told([&] { (void)optimizer_state_dict(training.optimizer); }), "save it with a Checkpointer");
    StateDict state = training.model.state_dict();
    EXPECT_EQ(state.is_empty(), context.rank() != 0);
    state.clear();
    expect(told([&] { training.model.load_state_dict(state); }), "missing: layers.0");
  });
}

struct PlainImpl : torch::nn::Module {
  template <typename Make>
  explicit PlainImpl(const Make& make) {
    make(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
};
using Plain = PlainImpl;

std::string refused(const Context& context, const std::function<void(Plain&)>& make) {
  return told([&] { const FullyShardedDataParallel model(std::make_shared<Plain>(make), context); });
}

const Engine kAll[] = {kMachines, kOneMachine, {3, "hierarchical", "abc"}, {4, "hierarchical", "aabb"}};

TEST(WrongFullySharded, ModelsInAnotherOrder) {
  for (const Engine& engine : {kMachines, Engine{3, "hierarchical", "abc"}, Engine{4, "hierarchical", "aabb"}})
    run_alike(engine, [](Context& context) {
      SmallGpt one(3), other(3);
      FullyShardedDataParallel first(one, context), second(other, context);
      const torch::NoGradGuard no_grad;
      auto& mine = context.rank() == context.world_size() - 1 ? second : first;
      const std::string said = told([&] {
        (void)mine(text_of(0, 0));
        (void)mine(text_of(0, 0));
      });
      // Where machines have several ranks, only those of one machine are told more than that it has left.
      if (context.world_size() == 4)
        EXPECT_NE(said, "");
      else
        expect(said, "the ranks use different models");
    });
}

TEST(WrongFullySharded, StatesThatDiffer) {
  for (const Engine& engine : kAll)
    run_alike(engine, [](Context& context) {
      Training training(context);
      SmallGpt other(3);
      const at::NoGradGuard no_grad;
      if (context.rank() == 1) other->head->weight.mul_(2);
      expect(told([&] { training.model.load_state_dict(state_dict(*other)); }),
             "the ranks were given different states");
      other->to(at::kDouble);
      expect(told([&] { training.model.load_state_dict(state_dict(*other)); }), "type of layers.0");
    });
}

TEST(WrongFullySharded, NormsLimitedDifferently) {
  for (const Engine& engine : kAll)
    run_alike(engine, [](Context& context) {
      Training training(context);
      training.loss(0).backward();
      expect(told([&] { (void)training.model.clip_grad_norm(context.rank() == 0 ? 1 : 2); }),
             "the ranks limit the norm differently");
    });
}

TEST(WrongFullySharded, AParameterUnfrozenAfterItsOptimizerWasMade) {
  run_alike(kMachines, [](Context& context) {
    SmallGpt net(3);
    net->head->bias.set_requires_grad(false);
    FullyShardedDataParallel model(net, context);
    std::optional<ZeroRedundancyOptimizer<torch::optim::SGD>> optimizer;
    optimizer.emplace(model, SGDOptions(0.1));
    net->head->bias.set_requires_grad(true);
    const auto train = [&] {
      const at::Tensor text = text_of(0, 0);
      loss_of(model(text), text).backward();
      optimizer->step();
    };
    expect(told(train), "head.bias has a gradient, but was frozen when the optimizer was made");
    optimizer.reset();
    optimizer.emplace(model, SGDOptions(0.1));
    EXPECT_EQ(told(train), "");
  });
}

TEST(WrongFullySharded, ValuesThatWentWithAnEarlierOne) {
  for (const Engine& engine : {kMachines, kOneMachine})
    run_alike(engine, [&](Context& context) {
      SmallGpt net(3);
      std::string before;
      {
        FullyShardedDataParallel model(net, context);
        before = model.hash();
      }
      const auto again = [&] { EXPECT_EQ(FullyShardedDataParallel(net, context).hash(), before); };
      if (engine.machines.empty())
        EXPECT_EQ(told(again), "");
      else
        expect(told(again), " has no values: another FullyShardedDataParallel holds them, or held them");
    });
}

TEST(WrongFullySharded, ALossThatOneRankDoesNotScale) {
  for (const Engine& engine : kAll)
    run_alike(engine, [](Context& context) {
      GradScaler scaler;
      Training training(context);
      const at::Tensor loss = training.loss(0);
      const bool scales = context.rank() != context.world_size() - 1;
      expect(told([&] { (scales ? scaler.scale(loss) : loss).backward(); }),
             "went through GradScaler::scale() on rank");
    });
}

TEST(WrongFullySharded, APartOfTheLossThatIsNotScaled) {
  const std::vector<std::function<at::Tensor(Training&, const at::Tensor&, const GradScaler&)>> losses{
      [](Training& training, const at::Tensor& output, const GradScaler& scaler) {
        return scaler.scale(output.square().mean()) + training.net->head->weight.square().sum();
      },
      [](Training&, const at::Tensor& output, const GradScaler& scaler) {
        return scaler.scale(output.square().mean()) + output.abs().mean();
      },
      [](Training&, const at::Tensor& output, const GradScaler& scaler) {
        return at::stack({scaler.scale(output.square().mean()), output.abs().mean()}).sum();
      }};
  for (const Engine& engine : kAll)
    for (const auto& loss : losses)
      run_alike(engine, [&](Context& context) {
        GradScaler scaler;
        Training training(context);
        loss(training, training.model(text_of(0, 0)), scaler).backward();
        expect(told([&] { scaler.step(training.optimizer); }), "added a value without scale() to a loss that scale()");
      });
}

/// So small that of four ranks one has all of it, and the others' parts are empty.
struct TinyImpl : torch::nn::Module {
  TinyImpl() { register_module("layer", layer); }
  at::Tensor forward(const at::Tensor& x) { return layer(x); }
  ShardedUnit<torch::nn::Linear> layer{3, 2};
};
TORCH_MODULE(Tiny);

TEST(WrongFullySharded, AScalerOnRanksWhosePartsAreEmpty) {
  run_alike({4, "shm"}, [](Context& context) {
    const auto said = [&](const std::function<void(GradScaler&, const at::Tensor&, torch::optim::Optimizer&)>& wrong) {
      GradScaler scaler;
      Tiny net;
      FullyShardedDataParallel model(net, context);
      ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(model, SGDOptions(0.1));
      scaler.scale(model(at::ones({4, 3})).sum()).backward();
      EXPECT_TRUE(scaler.step(optimizer));
      scaler.update();
      optimizer.zero_grad();
      const at::Tensor loss = model(at::ones({4, 3})).sum();
      return told([&] { wrong(scaler, loss, optimizer); });
    };
    expect(said([](GradScaler& scaler, const at::Tensor& loss, torch::optim::Optimizer& optimizer) {
             (loss * scaler.get_scale()).backward();
             scaler.step(optimizer);
           }),
           "GradScaler: ranks 0-3 ran backward without scale()");
    expect(said([](GradScaler& scaler, const at::Tensor& loss, torch::optim::Optimizer&) {
             scaler.scale(loss).backward();
             scaler.load_state_dict(scaler.state_dict());
           }),
           "called load_state_dict() between backward() and the scaler's step");
    expect(said([](GradScaler& scaler, const at::Tensor& loss, torch::optim::Optimizer& optimizer) {
             scaler.scale(loss).backward();
             scaler.unscale(optimizer);
             optimizer.zero_grad();
             scaler.step(optimizer);
           }),
           "cleared the gradients of the optimizer between unscale() and step()");
  });
}

TEST(WrongFullySharded, ASecondPassWithoutScaleOnRanksWhosePartsAreEmpty) {
  run_alike({4, "shm"}, [](Context& context) {
    GradScaler scaler;
    Tiny net;
    FullyShardedDataParallel model(net, context);
    ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(model, SGDOptions(0.1));
    scaler.scale(model(at::ones({4, 3})).sum()).backward();
    model(at::ones({4, 3})).sum().backward();
    expect(told([&] { scaler.step(optimizer); }),
           "GradScaler: ranks 0-3 ran 1 of 2 backward passes without scale() since the last update(), so ");
  });
}

TEST(WrongFullySharded, CallsOfTwoModelsInAnotherOrder) {
  for (const Engine& engine : kAll)
    for (const auto& call : std::vector<std::function<void(Training&)>>{
             [](Training& one) { one.optimizer.step(); }, [](Training& one) { (void)one.model.clip_grad_norm(1); },
             [](Training& one) { (void)one.model.hash(); }, [](Training& one) { (void)one.model.state_dict(); }})
      run_alike(engine, [&](Context& context) {
        Training first(context), second(context);
        for (Training* one : {&first, &second}) one->loss(0).backward();
        expect(told([&] { call(context.rank() == 0 ? first : second); }), "odel 2");
      });
}

TEST(WrongFullySharded, GradientsThatStillHaveAScale) {
  for (const Engine& engine : kAll)
    run_alike(engine, [](Context& context) {
      GradScaler scaler(GradScalerOptions{.init_scale = 1024});
      const std::string words = "while the gradients still have the scale of a GradScaler";
      Training training(context), plain(context);
      for (int step = 0; step < 2; ++step) {
        for (Training* one : {&training, &plain}) one->optimizer.zero_grad();
        scaler.scale(training.loss(step)).backward();
        expect(told([&] { (void)training.model.clip_grad_norm(0.01); }), "clip_grad_norm() was called " + words);
        expect(told([&] { training.optimizer.step(); }), "step() was called " + words);
        scaler.unscale(training.optimizer);
        (void)training.model.clip_grad_norm(0.01);
        EXPECT_TRUE(scaler.step(training.optimizer));
        scaler.update();
        plain.loss(step).backward();
        (void)plain.model.clip_grad_norm(0.01);
        plain.optimizer.step();
      }
      EXPECT_EQ(training.model.hash(), plain.model.hash());
      training.optimizer.zero_grad();
      scaler.scale(training.loss(2)).backward();
      scaler.unscale(training.optimizer);
      scaler.scale(training.loss(3)).backward();
      expect(told([&] { scaler.step(training.optimizer); }), "through scale() between unscale() and step()");
    });
}

TEST(WrongFullySharded, AParameterFrozenOnOneRank) {
  for (const Engine& engine : kAll)
    run_alike(engine, [](Context& context) {
      Training training(context);
      if (context.rank() == 1) training.net->head->bias.set_requires_grad(false);
      training.loss(0).backward();
      expect(told([&] { training.optimizer.step(); }), "frozen head.bias");
    });
}

TEST(WrongFullySharded, ALayerThatIsReplaced) {
  for (const Engine& engine : kAll)
    run_alike(engine, [](Context& context) {
      Training training(context);
      training.net->replace_module("head", training.net->head = torch::nn::Linear(SmallGptImpl::kWidth, 7));
      training.loss(0).backward();
      expect(told([&] { training.optimizer.step(); }), "the module has been edited since it was made");
    });
}

TEST(WrongFullySharded, TwoOptimizers) {
  for (const Engine& engine : kAll)
    run_alike(engine, [](Context& context) {
      SmallGpt net(3);
      FullyShardedDataParallel model(net, context);
      std::optional<ZeroRedundancyOptimizer<torch::optim::SGD>> first(std::in_place, model, SGDOptions(0.1));
      expect(told([&] { ZeroRedundancyOptimizer(model, SGDOptions(0.1)); }),
             "another optimizer already steps its parts");
      first.reset();
      EXPECT_EQ(told([&] { ZeroRedundancyOptimizer(model, SGDOptions(0.1)); }), "");
    });
}

TEST(WrongFullySharded, AnEmptyModule) {
  run_alike(kMachines, [](Context& context) {
    expect(told([&] { const FullyShardedDataParallel model(SmallGpt(nullptr), context); }), "the module is empty");
  });
}

TEST(WrongFullySharded, ModulesThatItDoesNotTake) {
  using Linear = torch::nn::Linear;
  run_alike(kMachines, [](Context& context) {
    const auto unit = [] { return ShardedUnit<Linear>(4, 4); };
    expect(refused(context, [](Plain& net) { net.register_module("plain", Linear(4, 4)); }), "the module has no units");
    expect(refused(context,
                   [&](Plain& net) {
                     net.register_module("unit", unit());
                     net.register_buffer("mask", at::ones({3}));
                   }),
           "the module has the buffer mask");
    expect(refused(context,
                   [&](Plain& net) {
                     auto one = unit();
                     net.register_module("one", one);
                     net.register_module("two", one);
                   }),
           "one and two are the same ShardedUnit");
    expect(refused(context,
                   [&](Plain& net) {
                     auto one = unit();
                     auto head = Linear(4, 4);
                     net.register_module("one", one);
                     net.register_module("head", head);
                     head->weight = head->register_parameter("tied", one->weight);
                   }),
           "belong to different units");
    expect(refused(context, [&](Plain& net) { net.register_module("unit", unit())->to(at::kFloat8_e4m3fn); }),
           "is neither float, double, float16 nor bfloat16");
    expect(refused(context,
                   [&](Plain& net) {
                     net.register_module("unit", context.rank() == 0 ? unit() : ShardedUnit<Linear>(4, 5));
                   }),
           "the ranks do not hold the same model");
    expect(
        refused(context, [&](Plain& net) { net.register_module("outer", unit())->register_module("inner", unit()); }),
        "is a ShardedUnit within outer");
  });
}

TEST(WrongFullySharded, MachinesThatItDoesNotTake) {
  for (const auto& [machines, words] : {std::pair{"aab", "start the same number of ranks on each machine"},
                                        {"abab", "must have consecutive numbers"},
                                        {"aaabbb", "start 1, 2, 4, 8"}})
    run_alike({static_cast<int>(std::string(machines).size()), "hierarchical", machines},
              [words = words](Context& context) {
                SmallGpt net(2);
                expect(told([&] { const FullyShardedDataParallel model(net, context); }), words);
              });
}

}  // namespace
}  // namespace lockstep::wrong_fully_sharded_test
