// Training on machines that LOCKSTEP_MACHINE makes, against closed forms and against the same formulas on one rank.

#include "diloco/training.h"

namespace lockstep::diloco_test {
namespace {

using namespace lockstep::testing;  // NOLINT

class DiLoCoOn : public ::testing::TestWithParam<Engine> {};
INSTANTIATE_TEST_SUITE_P(Machines, DiLoCoOn, ::testing::ValuesIn(kMachines),
                         [](const auto& instance) { return name_of(instance.param); });

/// By machine, in the order of their first ranks.
std::vector<std::vector<int>> machines_of(const Engine& engine) {
  std::vector<std::vector<int>> machines;
  std::string seen;
  for (size_t rank = 0; rank < engine.machines.size(); ++rank) {
    const size_t known = seen.find(engine.machines[rank]);
    if (known == std::string::npos) {
      seen += engine.machines[rank];
      machines.emplace_back();
    }
    machines[std::min(known, machines.size() - 1)].push_back(static_cast<int>(rank));
  }
  return machines;
}

/// Parameters and gradients that are whole multiples of 1/64, so that all sums and means over 1, 2 or 4 are exact.
TEST_P(DiLoCoOn, OneStepOfPlainSgdIsTheAverageOfParameters) {
  const auto machines = machines_of(GetParam());
  const size_t count = machines.size();
  if ((count & (count - 1)) != 0 || machines.front().size() != machines.back().size()) return;
  run_ranks(GetParam(), [&](Context& context) {
    const at::Tensor weight = at::arange(77, at::kFloat).div_(64).add_(context.rank()).requires_grad_();
    DistributedDataParallel model(NamedTensors{{"weight", weight}}, context.group().on_this_machine());
    LocalSGD average(model, context, 1);
    EXPECT_TRUE(at::equal(weight, at::arange(77, at::kFloat).div_(64))) << "rank 0's";
    torch::optim::SGD optimizer({weight}, 1);
    at::Tensor expected = weight.detach().clone();
    for (int step = 1; step <= 3; ++step) {
      const auto gradient_of = [&](int rank) {
        return at::arange(77, at::kFloat).mul(rank + step).remainder(9).div(at::Scalar(1.0 / 4));
      };
      optimizer.zero_grad();
      (weight * gradient_of(context.rank())).sum().backward();
      optimizer.step();
      EXPECT_TRUE(average.step());
      at::Tensor mean = at::zeros({77});
      for (const auto& ranks : machines)
        for (const int rank : ranks) mean += gradient_of(rank);
      expected -= mean / context.world_size();
      EXPECT_TRUE(at::equal(weight, expected)) << "step " << step;
    }
  });
}

TEST_P(DiLoCoOn, MachinesHaveTheSameBitsAfterEverySynchronisation) {
  for (const Wire wire : {Wire::kFloat32, Wire::kBFloat16, Wire::kInt8, Wire::kInt4})
    run_ranks(GetParam(), [&](Context& context) {
      Training training(context, {.sync_every = 3, .wire = wire, .error_feedback = wire == Wire::kInt4});
      training.expect_equal(training.weights());
      for (int step = 1; step <= 9; ++step) {
        training.train_until(step);
        const std::string mine = training.weights();
        const auto all = context.group().all_gather_bytes(mine);
        const bool alike = std::count(all.begin(), all.end(), mine) == context.world_size();
        const bool one_machine = machines_of(GetParam()).size() == 1;
        EXPECT_EQ(alike, one_machine || step % 3 == 0) << "step " << step;
      }
      const DiLoCoStats stats = training.diloco.stats();
      EXPECT_EQ(stats.steps, 9);
      EXPECT_EQ(stats.rounds, 3);
      EXPECT_EQ(stats.took_part, std::vector<bool>(machines_of(GetParam()).size(), true));
      EXPECT_EQ(stats.rounds_by_machine, std::vector<int64_t>(stats.took_part.size(), 3));
    });
}

/// The same sums in the same order by LibTorch's own optimizers on one rank.
TEST_P(DiLoCoOn, FollowsTheFormulas) {
  const auto machines = machines_of(GetParam());
  run_ranks(GetParam(), [&](Context& context) {
    constexpr int kEvery = 4, kSteps = 12;
    Training training(context, {.sync_every = kEvery}, torch::optim::AdamOptions(0.02));
    std::vector<Net> nets;
    std::vector<std::unique_ptr<torch::optim::Adam>> inner;
    std::vector<at::Tensor> outer;
    for (const auto& parameter : training.net->parameters()) outer.push_back(parameter.detach().clone());
    torch::optim::SGD sgd(outer, torch::optim::SGDOptions(0.7).momentum(0.9).nesterov(true));
    const auto set = [&](Net& net) {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < outer.size(); ++i) net->parameters()[i].copy_(outer[i]);
    };
    for (size_t machine = 0; machine < machines.size(); ++machine) {
      nets.emplace_back();
      set(nets.back());
      inner.push_back(std::make_unique<torch::optim::Adam>(nets.back()->parameters(), torch::optim::AdamOptions(0.02)));
    }
    for (int step = 0; step < kSteps; ++step) {
      training.train_until(step + 1);
      for (size_t machine = 0; machine < machines.size(); ++machine) {
        inner[machine]->zero_grad();
        for (const int rank : machines[machine])
          (loss_of(nets[machine], data_of(step, rank)) / static_cast<double>(machines[machine].size())).backward();
        inner[machine]->step();
      }
      if ((step + 1) % kEvery != 0) continue;
      for (size_t i = 0; i < outer.size(); ++i) {
        at::Tensor mean = at::zeros_like(outer[i]);
        for (Net& net : nets) mean += outer[i] - net->parameters()[i].detach();
        outer[i].mutable_grad() = mean / static_cast<double>(nets.size());
      }
      sgd.step();
      for (Net& net : nets) set(net);
      for (size_t i = 0; i < outer.size(); ++i)
        EXPECT_TRUE(at::allclose(training.net->parameters()[i], outer[i], 1e-4, 1e-5))
            << "step " << step << ' ' << (training.net->parameters()[i] - outer[i]).abs().max();
    }
  });
}

/// tests/python/diloco_programs.py makes the same moves, and has the same number.
TEST(DiLoCo, HasTheBitsThatPythonHas) {
  constexpr int64_t kBits = -3890758992892;
  run_ranks({2, "hierarchical", "ab"}, [&](Context& context) {
    Net net;
    const auto set = [&](const auto& value_of) {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters())
        value_of(parameter, at::arange(parameter.numel()).view(parameter.sizes()));
    };
    set([](at::Tensor& parameter, const at::Tensor& places) { parameter.copy_((places.remainder(13) - 6) / 16); });
    DistributedDataParallel model(net, context.group().on_this_machine());
    DiLoCo diloco(model, context,
                  {.sync_every = 4, .fragments = 2, .overlap_steps = 1, .wire = Wire::kInt8, .error_feedback = true});
    for (int step = 0; step < 11; ++step) {
      set([&](at::Tensor& parameter, const at::Tensor& places) {
        parameter += ((places * 31 + step * 17 + context.rank() * 11).remainder(101) - 50) / 4096;
      });
      diloco.step();
    }
    diloco.finish();
    std::vector<at::Tensor> all;
    for (const auto& parameter : net->parameters()) all.push_back(parameter.detach().flatten());
    const at::Tensor bits = at::cat(all).view(at::kInt).to(at::kLong);
    EXPECT_EQ((bits * (at::arange(bits.numel()) + 1)).sum().item<int64_t>(), kBits);
  });
}

}  // namespace
}  // namespace lockstep::diloco_test
