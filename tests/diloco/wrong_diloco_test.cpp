// Options, models and calls that cannot work, and machines whose numbers are not finite: told on all ranks.

#include <cmath>
#include <limits>

#include <lockstep/ema.h>
#include <lockstep/grad_scaler.h>
#include <lockstep/lr_scheduler.h>
#include <lockstep/schedule.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "diloco/training.h"
#include "support/heard_warnings.h"

namespace lockstep::diloco_test {
namespace {

using namespace lockstep::testing;  // NOLINT

const Engine kEngines[] = {{4, "hierarchical", "aabb"}, {3, "hierarchical", "abc"}, {2, "gloo", "ab"}};

std::string thrown_by(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing";
}

void expect_text(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(WrongDiLoCo, OptionsThatDifferAreNamedOnAllRanks) {
  for (const Engine& engine : kEngines)
    run_ranks(engine, [&](Context& context) {
      const bool odd = context.rank() == context.world_size() - 1;
      Net net;
      DistributedDataParallel model(net, context.group().on_this_machine());
      const auto with = [&](const std::function<void(DiLoCoOptions&)>& change) {
        DiLoCoOptions options{.sync_every = 10};
        if (odd) change(options);
        return thrown_by([&] { DiLoCo(model, context, options); });
      };
      const std::string last = " on rank " + std::to_string(context.world_size() - 1);
      expect_text(with([](auto& options) { options.sync_every = 20; }),
                  "the ranks gave different options: option 0 is `sync_every 10` on rank");
      expect_text(with([](auto& options) { options.sync_every = 0; }), "`sync_every 0`" + last);
      expect_text(with([](auto& options) { options.fragments = 2; }), "`fragments 2`" + last);
      expect_text(with([](auto& options) { options.overlap_steps = 1; }), "`overlap_steps 1`" + last);
      expect_text(with([](auto& options) { options.mixing = 0.1; }), "`mixing 0.1`" + last);
      expect_text(with([](auto& options) { options.wire = Wire::kInt4; }), "`wire int4`" + last);
      expect_text(with([](auto& options) { options.error_feedback = true; }), "`error_feedback 1`" + last);
      expect_text(with([](auto& options) { options.outer_lr = std::nan(""); }), "`outer_lr nan`" + last);
      expect_text(with([](auto& options) { options.outer_lr += 1e-12; }), "option 6 is `outer_lr 0.7");
      expect_text(with([](auto& options) { options.outer_momentum = 0; }), "`outer_momentum 0`" + last);
      expect_text(with([](auto& options) { options.nesterov = false; }), "`nesterov 0`" + last);
      expect_text(with([](auto& options) { options.max_nonfinite_rounds = 9; }), "`max_nonfinite_rounds 9`" + last);
      const auto adam = [&](double lr) {
        return [lr](const std::vector<at::Tensor>& parameters) {
          return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(lr));
        };
      };
      expect_text(with([&](auto& options) { options.outer_optimizer = adam(1); }), "`outer_optimizer given`" + last);
      expect_text(thrown_by([&] { DiLoCo(model, context, {.outer_optimizer = adam(odd ? 0.1 : 0.2)}); }),
                  "the ranks gave different options: ");
      EXPECT_EQ(with([](auto&) {}), "nothing") << "after all this";
    });
}

TEST(WrongDiLoCo, OptionsOutOfRangeAreRefused) {
  run_ranks({2, "hierarchical", "ab"}, [](Context& context) {
    Net net;
    DistributedDataParallel model(net, context.group().on_this_machine());
    const double nan = std::nan(""), infinity = std::numeric_limits<double>::infinity();
    const auto with = [&](const DiLoCoOptions& options) { return thrown_by([&] { DiLoCo(model, context, options); }); };
    expect_text(with({.sync_every = 0}), "sync_every is 0; it is a number of steps, at least 1");
    expect_text(with({.sync_every = -3}), "sync_every is -3");
    expect_text(with({.fragments = 5}),
                "fragments is 5; it must be from 1 to the number of parameters that require grad, 4");
    expect_text(with({.fragments = 0}), "fragments is 0");
    expect_text(with({.sync_every = 4, .overlap_steps = 4}),
                "overlap_steps is 4; it must be at least 0 and below sync_every, 4");
    expect_text(with({.overlap_steps = -1}), "overlap_steps is -1");
    for (const double mixing : {nan, -0.1, 1.1, infinity}) expect_text(with({.mixing = mixing}), "mixing is ");
    for (const double lr : {nan, 0.0, -1.0, infinity}) expect_text(with({.outer_lr = lr}), "outer_lr is ");
    for (const double momentum : {nan, -0.1, 1.0, infinity})
      expect_text(with({.outer_momentum = momentum}), "outer_momentum is ");
    expect_text(with({.max_nonfinite_rounds = 0}), "max_nonfinite_rounds is 0");
    expect_text(with({.outer_optimizer = [](const auto&) { return nullptr; }}), "outer_optimizer returned null");
    torch::nn::Linear wide(3, 4);
    wide->to(at::kDouble);
    DistributedDataParallel of_doubles(wide, context.group().on_this_machine());
    expect_text(thrown_by([&] { DiLoCo(of_doubles, context); }), "DiLoCo: parameter weight is Double");
  });
}

TEST(WrongDiLoCo, ModelsMustBeTheSameAndStayOnTheirMachines) {
  run_ranks({4, "hierarchical", "aabb"}, [](Context& context) {
    const bool odd = context.rank() >= 2;
    torch::nn::Linear net(3, odd ? 5 : 4);
    DistributedDataParallel model(net, context.group().on_this_machine());
    expect_text(thrown_by([&] { DiLoCo(model, context); }),
                "the ranks do not hold the same model: parameter 0 is `weight: Float [4, 3] on cpu` on ranks 0, 1 and "
                "`weight: Float [5, 3] on cpu` on ranks 2, 3");
    Net same;
    {
      DistributedDataParallel everywhere(same, context);
      expect_text(thrown_by([&] { DiLoCo(everywhere, context); }),
                  "DiLoCo: the model of ranks 0-3 is replicated over several machines");
    }
    DistributedDataParallel half(same, context.group().on_this_machine());
    expect_text(thrown_by([&] { DiLoCo(half, context.group().split(context.rank() % 2)); }),
                "the DiLoCo's group has 2; make it with the group");
  });
}

TEST(WrongDiLoCo, MachinesAtDifferentStepsAreTold) {
  for (const Engine& engine : kEngines)
    run_ranks(engine, [&](Context& context) {
      Training training(context, {.sync_every = 3});
      training.train_until(4);
      const bool last = engine.machines[static_cast<size_t>(context.rank())] == engine.machines.back();
      if (last) training.diloco.step();
      const std::string text = thrown_by([&] { training.diloco.finish(); });
      expect_text(text, "DiLoCo: machine 0 (");
      expect_text(text, "; all machines must call step() equally often, and finish() at the same step");
    });
}

TEST(WrongDiLoCo, MachinesThatFinishAtDifferentStepsAreToldAlsoAfterARound) {
  for (const Engine& engine : kEngines)
    for (const int ahead : {1, 4})
      run_ranks(engine, [&](Context& context) {
        Training training(context, {.sync_every = 4});
        training.train_until(4);
        const bool last = engine.machines[static_cast<size_t>(context.rank())] == engine.machines.back();
        const std::string text = thrown_by([&] {
          for (int step = 0; step < (last ? ahead : 0); ++step) training.diloco.step();
          training.diloco.finish();
        });
        expect_text(text, "DiLoCo: machine 0 (");
        expect_text(text, " is at step 4, in finish(), and machine ");
        expect_text(text, "; all machines must call step() equally often, and finish() at the same step");
      });
}

TEST(WrongDiLoCo, AModelThatWasRefreshedIsRefused) {
  for (const Engine& engine : kEngines)
    run_ranks(engine, [&](Context& context) {
      Training training(context, {.sync_every = 3});
      training.train_until(2);
      const bool last = engine.machines[static_cast<size_t>(context.rank())] == engine.machines.back();
      if (last) training.model.refresh();
      expect_text(thrown_by([&] { training.train_until(3); }),
                  " was changed by refresh() after the DiLoCo was made; make a new DiLoCo on every rank after an edit");
    });
}

TEST(WrongDiLoCo, AParameterThatIsFrozenLaterIsNamed) {
  for (const Engine& engine : kEngines)
    run_ranks(engine, [&](Context& context) {
      Training training(context, {.sync_every = 3});
      training.train_until(2);
      const bool last = engine.machines[static_cast<size_t>(context.rank())] == engine.machines.back();
      if (last) training.net->first->bias.set_requires_grad(false);
      const std::string text = thrown_by([&] { training.diloco.step(); });
      expect_text(text, "DiLoCo: parameter first.bias of machine ");
      expect_text(text, " was frozen after the DiLoCo was made");
    });
}

/// It trains again when its turn comes, and has moved less than on the machines that did not freeze it.
TEST(WrongDiLoCo, AParameterThatIsFrozenBetweenTwoTurnsIsNamed) {
  for (const Engine& engine : kEngines)
    for (const bool finishes : {false, true})
      run_ranks(engine, [&](Context& context) {
        Training training(context, {.sync_every = 4});
        training.train_until(1);
        const bool last = engine.machines[static_cast<size_t>(context.rank())] == engine.machines.back();
        if (last) training.net->first->bias.set_requires_grad(false);
        training.diloco.step();
        training.net->first->bias.set_requires_grad(true);
        const std::string text = thrown_by([&] {
          training.diloco.step();
          finishes ? training.diloco.finish() : (void)training.diloco.step();
        });
        expect_text(text, "DiLoCo: parameter first.bias of machine ");
        expect_text(text, " was frozen after the DiLoCo was made");
      });
}

TEST(WrongDiLoCo, ReplicasOfAMachineThatDifferAreTold) {
  for (const auto& [engine, expected] :
       {std::pair(Engine{4, "hierarchical", "aabb"},
                  "the replicas of machine 1 (ranks 2, 3) differ: rank 3 has other "
                  "parameters than rank 2; reduce gradients in each step"),
        std::pair(Engine{3, "hierarchical", "aba"}, "differ: rank 2 has other parameters than rank 0"),
        std::pair(Engine{4, "shm", "aaaa"}, "differ: rank 3 has other parameters than rank 0")})
    for (const bool finishes : {false, true})
      run_ranks(engine, [&, expected = expected](Context& context) {
        Training training(context, {.sync_every = 3});
        training.train_until(2);
        if (context.rank() == context.world_size() - 1) {
          const torch::NoGradGuard no_grad;
          training.net->second->weight[4][18] += 0.5;
        }
        expect_text(thrown_by([&] { finishes ? training.diloco.finish() : (void)training.diloco.step(); }), expected);
      });
}

TEST(WrongDiLoCo, ErrorsWithinAMachineTellTheRanksOfTheRun) {
  run_ranks({4, "hierarchical", "aabb"}, [](Context& context) {
    Training training(context, {.sync_every = 4});
    if (context.rank() == 3) training.net->first->bias.set_requires_grad(false);
    const std::string text = thrown_by([&] { training.testing_loss().backward(); });
    if (context.rank() < 2) return;
    expect_text(text, "parameter first.bias is frozen (requires_grad_(false)) on rank 1 and not on rank 0");
    expect_text(text, "\nRanks 0, 1 of subgroup ");
    expect_text(text, " are ranks 2, 3 of all.");
  });
}

TEST(WrongDiLoCo, AModelHasOneDiLoCoOfAllItsMachines) {
  run_ranks({4, "hierarchical", "aabb"}, [](Context& context) {
    Net net;
    DistributedDataParallel model(net, context.group().on_this_machine());
    const auto make = [&](const Group& group) { return thrown_by([&] { DiLoCo(model, group); }); };
    expect_text(make(context.group().on_this_machine()),
                "DiLoCo: its group has the 2 ranks of one machine, and the run has 4, so nothing would synchronise the "
                "machines");
    {
      DiLoCo diloco(model, context);
      expect_text(make(context.group()), "DiLoCo: the model already has a DiLoCo");
      DiLoCo second(std::move(diloco));
      expect_text(make(context.group()), "DiLoCo: the model already has a DiLoCo");
    }
    EXPECT_EQ(make(context.group()), "nothing");
  });
}

TEST(WrongDiLoCo, AnOuterOptimizerOfOtherTensorsIsRefused) {
  run_ranks({3, "hierarchical", "aab"}, [](Context& context) {
    Net net;
    DistributedDataParallel model(net, context.group().on_this_machine());
    const auto made = [&](bool wrong) {
      return thrown_by([&] {
        DiLoCo(model, context, {.outer_optimizer = [wrong](const std::vector<at::Tensor>& parameters) {
                 return std::make_unique<torch::optim::SGD>(
                     wrong ? std::vector<at::Tensor>{at::zeros({3})} : parameters, torch::optim::SGDOptions(0.1));
               }});
      });
    };
    const std::string refused =
        "DiLoCo: outer_optimizer returned an optimizer of tensors other than those it was given";
    expect_text(made(true), refused);
    expect_text(made(context.rank() == 2), "DiLoCo: the outer optimizer could not be made on rank 2: " + refused);
    const auto throws = [&](const std::vector<at::Tensor>& parameters) -> std::unique_ptr<torch::optim::Optimizer> {
      if (context.rank() == 1) throw std::runtime_error("no such file");
      return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.1));
    };
    expect_text(thrown_by([&] { DiLoCo(model, context, {.outer_optimizer = throws}); }),
                "DiLoCo: the outer optimizer could not be made on rank 1: no such file");
    EXPECT_EQ(made(false), "nothing");
  });
}

TEST(WrongDiLoCo, OneThatWasMovedFromOrGetsNoStateIsTold) {
  run_ranks({2, "hierarchical", "ab"}, [](Context& context) {
    Net net;
    DistributedDataParallel model(net, context.group().on_this_machine());
    DiLoCo first(model, context);
    DiLoCo second(std::move(first));
    const std::function<void()> calls[] = {[&] { first.step(); }, [&] { first.finish(); }, [&] { (void)first.stats(); },
                                           [&] { (void)first.state_dict(); },
                                           [&] { first.load_state_dict(StateDict()); }};
    for (const auto& call : calls) expect_text(thrown_by(call), "this DiLoCo was moved from");
    expect_text(thrown_by([&] { second.load_from_ranks({}); }), "DiLoCo: the list of the ranks' states is empty");
    second.finish();
  });
}

TEST(WrongDiLoCo, OneThatIsDestroyedBeforeItHasFinishedWarns) {
  run_ranks({4, "hierarchical", "aabb"}, [](Context& context) {
    enum class End { kAtATurn, kFinished, kSaved, kThrown, kNone };
    const auto heard = [&](End end) {
      const testing::HeardWarnings warnings;
      (void)thrown_by([&] {
        Training training(context, {.sync_every = 4});
        training.train_until(end == End::kAtATurn ? 4 : 6);
        if (end == End::kFinished) training.diloco.finish();
        if (end == End::kSaved) (void)training.diloco.state_dict();
        if (end == End::kThrown) throw Error("interrupted");
      });
      return warnings.text();
    };
    for (const End end : {End::kAtATurn, End::kFinished, End::kSaved, End::kThrown}) EXPECT_EQ(heard(end), "");
    const bool warns = context.rank() % 2 == 0;
    EXPECT_EQ(heard(End::kNone).find("DiLoCo: destroyed 2 steps after the last round") != std::string::npos, warns);
  });
}

TEST(WrongDiLoCo, AMachineThatIsNotFiniteIsLeftOutAndGoesOnFromTheOuterCopy) {
  for (const Engine& engine : kEngines)
    for (const int64_t overlap : {0, 1})
      run_ranks(engine, [&](Context& context) {
        Training training(context, {.sync_every = 4, .fragments = 2, .overlap_steps = overlap, .error_feedback = true},
                          torch::optim::AdamOptions(0.01));
        const char bad = engine.machines.back(), mine = engine.machines[static_cast<size_t>(context.rank())];
        training.train_until(3);
        if (mine == bad) {
          // One number only, in a slice of one rank.
          const torch::NoGradGuard no_grad;
          training.net->first->weight[18][6] =
              engine.world_size == 3 ? std::nan("") : std::numeric_limits<float>::infinity();
        }
        training.diloco.step();
        training.diloco.step();
        const DiLoCoStats stats = training.diloco.stats();
        EXPECT_LT(stats.rounds_by_machine.back(), stats.rounds);
        for (size_t machine = 0; machine + 1 < stats.rounds_by_machine.size(); ++machine)
          EXPECT_EQ(stats.rounds_by_machine[machine], stats.rounds);
        for (const auto& parameter : training.net->parameters())
          EXPECT_TRUE(at::isfinite(parameter).all().item<bool>());
        training.set_step(5);
        training.train_until(16);
        training.diloco.finish();
        training.expect_equal(training.weights());
        EXPECT_EQ(training.diloco.stats().rounds_by_machine.back(), training.diloco.stats().rounds - 1);
        for (const auto& parameter : training.net->parameters())
          EXPECT_TRUE(at::isfinite(parameter).all().item<bool>());
      });
}

TEST(WrongDiLoCo, RoundsInWhichNoMachineIsFiniteEndTheTraining) {
  for (const Engine& engine : kEngines)
    for (const int64_t overlap : {0, 1})
      run_ranks(engine, [&](Context& context) {
        Training training(context, {.sync_every = 2, .overlap_steps = overlap, .max_nonfinite_rounds = 2});
        std::string thrown = "nothing";
        const auto step = [&](int times) {
          for (; times > 0 && thrown == "nothing"; --times) thrown = thrown_by([&] { training.diloco.step(); });
        };
        for (const bool all_bad : {true, false, true, true}) {
          EXPECT_EQ(thrown, "nothing");
          const torch::NoGradGuard no_grad;
          if (all_bad || context.rank() == 0) training.net->first->weight[0][0] = std::nan("");
          step(2);
        }
        step(static_cast<int>(overlap));
        expect_text(thrown,
                    "DiLoCo: the parameters of all machines were not finite in 2 rounds in a row, 3 and 4, so nothing");
        EXPECT_EQ(thrown_by([&] { training.diloco.finish(); }), thrown);
      });
}

// The other fragment's rounds, which are finite, do not make up for it.
TEST(WrongDiLoCo, RoundsOfAFragmentInWhichNoMachineIsFiniteEndTheTraining) {
  run_ranks({2, "hierarchical", "ab"}, [&](Context& context) {
    Training training(context, {.sync_every = 2, .fragments = 2, .max_nonfinite_rounds = 2});
    std::string thrown = "nothing";
    for (int step = 0; step < 8 && thrown == "nothing"; ++step) {
      const torch::NoGradGuard no_grad;
      training.net->first->weight[0][0] = std::nan("");
      thrown = thrown_by([&] { training.diloco.step(); });
    }
    expect_text(thrown, "DiLoCo: the parameters of all machines were not finite in 2 rounds in a row, ");
  });
}

TEST(WrongDiLoCo, AnOuterCopyThatIsNotFiniteIsToldOnAllRanks) {
  for (const Engine& engine : kEngines)
    for (const int64_t overlap : {0, 1})
      run_ranks(engine, [&](Context& context) {
        Training training(context, {.sync_every = 4, .overlap_steps = overlap, .outer_lr = 1e30});
        StateDict before;
        training.train_until(2);
        before = training.diloco.state_dict();
        // A mean pseudo-gradient of 1e10 or so, times 1e30.
        {
          const torch::NoGradGuard no_grad;
          training.net->second->weight.mul_(1e10);
        }
        for (int step = 2; step < 3 + overlap; ++step) training.diloco.step();
        const auto expected = state_dict(*training.net)["second.weight"].clone();
        const std::string text = thrown_by([&] { training.diloco.step(); });
        expect_text(text,
                    "DiLoCo: the outer copy of parameter second.weight is not finite after the round that ended "
                    "in step " +
                        std::to_string(4 + overlap));
        expect_text(text, "outer_lr is 1e+30 and outer_momentum 0.9: give less");
        EXPECT_TRUE(at::equal(training.net->second->weight, expected)) << "the machine's own weights are lost";
        // Nothing goes on from it, but what was saved before it.
        const std::function<void()> calls[] = {[&] { training.diloco.step(); }, [&] { training.diloco.finish(); },
                                               [&] { (void)training.diloco.state_dict(); }};
        for (const auto& call : calls) EXPECT_EQ(thrown_by(call), text);
        training.diloco.load_state_dict(before);
        EXPECT_EQ(thrown_by([&] { training.diloco.step(); }), "nothing");
      });
}

TEST(WrongDiLoCo, AModelThatIsNotFiniteIsRefused) {
  run_ranks({4, "hierarchical", "aabb"}, [](Context& context) {
    Net net;
    DistributedDataParallel model(net, context.group().on_this_machine());
    {
      const torch::NoGradGuard no_grad;
      net->first->bias[3] = std::nan("");
    }
    expect_text(thrown_by([&] { DiLoCo(model, context); }),
                "DiLoCo: parameter first.bias of rank 0 is not finite, and all machines would begin with it");
  });
}

TEST(WrongDiLoCo, WithoutAnyMachineTheOuterCopyStays) {
  run_ranks({2, "hierarchical", "ab"}, [](Context& context) {
    Training training(context, {.sync_every = 2});
    training.train_until(2);
    const std::string before = training.weights();
    {
      const torch::NoGradGuard no_grad;
      training.net->first->weight.fill_(std::nan(""));
    }
    training.diloco.step();
    EXPECT_TRUE(training.diloco.step());
    EXPECT_EQ(training.weights(), before);
    EXPECT_EQ(training.diloco.stats().took_part, std::vector<bool>(2, false));
  });
}

TEST(WrongDiLoCo, AMachineWithAnotherOuterCopyIsNamed) {
  for (const Engine& engine : kEngines)
    run_ranks(engine, [&](Context& context) {
      Training training(context, {.sync_every = 3, .fragments = 2, .overlap_steps = 1});
      training.train_until(7);
      StateDict state = training.diloco.state_dict();
      const bool odd = context.rank() == context.world_size() - 1;
      if (odd) state["fragment.1.outer"][0] += 1;
      training.diloco.load_state_dict(state);
      const std::string text = thrown_by([&] {
        training.train_until(11);
        training.diloco.finish();
      });
      expect_text(text, " has another outer copy than machine 0 (");
      expect_text(text, "load states that were saved together, on all machines, or make a new DiLoCo");
    });
}

TEST(WrongDiLoCo, ABufferThatIsNotFiniteStaysOnItsMachine) {
  for (const Engine& engine : kEngines)
    for (const bool everywhere : {false, true})
      run_ranks(engine, [&](Context& context) {
        torch::nn::Sequential net(torch::nn::Linear(7, 5), torch::nn::BatchNorm1d(5));
        const Group machine = context.group().on_this_machine();
        DistributedDataParallel model(net, machine);
        DiLoCo diloco(model, context, {.sync_every = 3});
        const at::NoGradGuard no_grad;
        at::Tensor mean = net->named_buffers()["1.running_mean"];
        const bool odd = context.rank() == context.world_size() - 1;
        mean.fill_(odd || everywhere ? std::numeric_limits<double>::quiet_NaN() : 2);
        // Its machine's other ranks would get it by the next forward in training.
        machine.broadcast(mean, machine.world_size() - 1);
        const testing::HeardWarnings warnings;
        diloco.finish();
        if (everywhere)
          EXPECT_TRUE(mean.isnan().all().item<bool>());
        else
          EXPECT_TRUE(mean.eq(2).all().item<bool>()) << mean;
        if (context.rank() == 0)
          expect_text(warnings.text(), "was left out of the average of the buffers, some of which are not finite");
      });
}

TEST(DiLoCoWith, SharedParametersClippingAccumulationSchedulesAndAverages) {
  for (const Engine& engine :
       {Engine{4, "shm", "aaaa"}, Engine{4, "hierarchical", "aabb"}, Engine{2, "hierarchical", "ab"}})
    for (const bool overlaps : {false, true})
      run_ranks(engine, [&](Context& context) {
        const auto weights_of = [&](bool shared) {
          torch::manual_seed(1);
          Net net;
          DistributedDataParallel model(net, context.group().on_this_machine());
          ZeroRedundancyOptimizer optimizer(model, torch::optim::AdamWOptions(0.01), {.shared_parameters = shared});
          DiLoCo diloco(model, context, {.sync_every = 4, .fragments = 2, .overlap_steps = overlaps ? 2 : 0});
          LRScheduler scheduler(optimizer, warm_up(5, cosine_annealing_lr(20)));
          Ema ema(*net, {.decays = {0.9}});
          for (int step = 0; step < 21; ++step) {
            optimizer.zero_grad();
            for (int pass = 0; pass < 2; ++pass) {
              const auto accumulation = model.accumulate(2);
              (loss_of(net, data_of(2 * step + pass, context.rank())) / 2).backward();
            }
            model.clip_grad_norm(0.5);
            optimizer.step();
            diloco.step();
            scheduler.step();
            ema.update();
            model.check_divergence();
          }
          if (!shared) {
            const auto averaged = ema.averaged_weights();
            EXPECT_NE(thrown_by([&] { diloco.step(); }).find("the model has averaged weights"), std::string::npos);
          }
          diloco.finish();
          model.check_divergence();
          return hash(state_dict(*net));
        };
        const std::string own = weights_of(false);
        for (const std::string& other : context.group().all_gather_bytes(own)) EXPECT_EQ(other, own);
        EXPECT_EQ(weights_of(/*shared=*/true), own);
      });
}

TEST(DiLoCoWith, StepsThatAScalerSkipsCount) {
  run_ranks({4, "hierarchical", "aabb"}, [](Context& context) {
    Net net;
    const Group machine = context.group().on_this_machine();
    DistributedDataParallel model(net, machine);
    DiLoCo diloco(model, context, {.sync_every = 3});
    torch::optim::SGD optimizer(net->parameters(), 0.01);
    GradScaler scaler(machine, {.init_scale = 1024});
    int stepped = 0;
    for (int step = 0; step < 6; ++step) {
      optimizer.zero_grad();
      at::Tensor loss = loss_of(net, data_of(step, context.rank()));
      if (step == 1 && context.rank() == 3) loss = loss * std::numeric_limits<float>::infinity();
      scaler.scale(loss).backward();
      stepped += scaler.step(optimizer) ? 1 : 0;
      scaler.update();
      EXPECT_EQ(diloco.step(), step % 3 == 2);
    }
    EXPECT_EQ(stepped, context.rank() >= 2 ? 5 : 6);
    const std::string mine = hash(state_dict(*net));
    for (const std::string& other : context.group().all_gather_bytes(mine)) EXPECT_EQ(other, mine);
    EXPECT_EQ(diloco.stats().rounds, 2);
  });
}

TEST(DiLoCoWith, BuffersAndFrozenParametersAndSixteenBits) {
  run_ranks({4, "hierarchical", "aabb"}, [](Context& context) {
    torch::manual_seed(context.rank());
    torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::BatchNorm1d(8), torch::nn::Linear(8, 3));
    net->to(at::kBFloat16);
    net->parameters()[0].set_requires_grad(false);
    DistributedDataParallel model(net, context.group().on_this_machine());
    DiLoCo diloco(model, context, {.sync_every = 4, .fragments = 5});
    const auto all_equal = [&] {
      const std::string mine = hash(state_dict(*net));
      const auto all = context.group().all_gather_bytes(mine);
      return std::count(all.begin(), all.end(), mine) == context.world_size();
    };
    EXPECT_TRUE(all_equal());
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    for (int step = 0; step < 9; ++step) {
      optimizer.zero_grad();
      net->forward(data_of(step, context.rank()).narrow(1, 0, 6).to(at::kBFloat16)).square().mean().backward();
      optimizer.step();
      diloco.step();
    }
    EXPECT_FALSE(all_equal());
    diloco.finish();
    EXPECT_TRUE(all_equal());
  });
}

TEST(DiLoCoWith, BuffersOfWhichEveryRankKeepsItsOwn) {
  for (const Engine& engine : {Engine{4, "hierarchical", "aabb"}, Engine{3, "hierarchical", "abc"}})
    run_ranks(engine, [](Context& context) {
      torch::nn::BatchNorm1d net(5);
      DistributedDataParallel model(net, context.group().on_this_machine(), {.buffers = BufferPolicy::kNone});
      DiLoCo diloco(model, context, {.sync_every = 3});
      at::Tensor mean = net->named_buffers()["running_mean"];
      mean.fill_(context.rank());
      diloco.finish();
      EXPECT_TRUE(mean.eq(context.rank()).all().item<bool>()) << mean;
    });
}

TEST(DiLoCoWith, AnotherOuterOptimizer) {
  run_ranks({3, "hierarchical", "aab"}, [](Context& context) {
    Training training(context, {.sync_every = 3, .outer_optimizer = [](const std::vector<at::Tensor>& parameters) {
                                  return std::make_unique<torch::optim::AdamW>(parameters,
                                                                               torch::optim::AdamWOptions(0.01));
                                }});
    training.train_until(6);
    training.expect_equal(training.weights());
  });
}

}  // namespace
}  // namespace lockstep::diloco_test
