// Fragments that take turns, overlap and wire formats, against the same formulas written down for all machines on each
// rank: the same bits where a machine has one rank.

#include <ATen/ATen.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "diloco/training.h"
#include "diloco/wire_format.h"

namespace lockstep::diloco_test {
namespace {

using namespace lockstep::testing;  // NOLINT

struct Case {
  Engine engine;
  DiLoCoOptions options;
  std::vector<std::vector<size_t>> fragments;  ///< of Net's four parameters
};

at::Tensor flat(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> rows;
  for (const at::Tensor& tensor : tensors) rows.push_back(tensor.detach().flatten());
  return at::cat(rows);
}

at::Tensor through(Wire wire, const at::Tensor& values) {
  std::vector<uint8_t> bytes(static_cast<size_t>(diloco::encoded_bytes(wire, values.numel())));
  const at::Tensor result = at::empty_like(values);
  diloco::encode(wire, values.const_data_ptr<float>(), values.numel(), bytes.data());
  diloco::decode(wire, bytes.data(), values.numel(), result.data_ptr<float>());
  return result;
}

/// All machines of one rank each, one after the other.
class Reference {
 public:
  Reference(const Case& given, const Net& initial) : case_(given) {
    for (int machine = 0; machine < given.engine.world_size; ++machine) {
      nets_.emplace_back();
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < 4; ++i) nets_.back()->parameters()[i].copy_(initial->parameters()[i]);
      inner_.push_back(
          std::make_unique<torch::optim::Adam>(nets_.back()->parameters(), torch::optim::AdamOptions(0.01)));
    }
    for (const auto& places : given.fragments) {
      outer_.push_back(flat(of(nets_.front(), places)));
      steps_.push_back(std::make_unique<ZeroRedundancyOptimizer<torch::optim::SGD>>(
          std::vector<at::Tensor>{outer_.back()}, torch::optim::SGDOptions(0.7).momentum(0.9).nesterov(true)));
      sent_at_.push_back(-1);
      rests_.emplace_back(nets_.size(), at::zeros_like(outer_.back()));
    }
    pending_.resize(outer_.size());
  }

  void step(int data_step) {
    const int now = data_step + 1;
    for (size_t machine = 0; machine < nets_.size(); ++machine) {
      inner_[machine]->zero_grad();
      loss_of(nets_[machine], data_of(data_step, static_cast<int>(machine))).backward();
      inner_[machine]->step();
    }
    const auto every = case_.options.sync_every, fragments = static_cast<int64_t>(outer_.size());
    for (size_t f = 0; f < outer_.size(); ++f)
      if (sent_at_[f] >= 0 && sent_at_[f] + case_.options.overlap_steps == now) apply(f, case_.options.mixing);
    for (size_t f = 0; f < outer_.size(); ++f) {
      if ((now + static_cast<int64_t>(f) * every / fragments) % every != 0) continue;
      send(f);
      sent_at_[f] = now;
      if (case_.options.overlap_steps == 0) apply(f, 0);
    }
  }
  std::string weights(int machine) const { return hash(state_dict(*nets_[static_cast<size_t>(machine)])); }

 private:
  static std::vector<at::Tensor> of(const Net& net, const std::vector<size_t>& places) {
    std::vector<at::Tensor> tensors;
    for (const size_t place : places) tensors.push_back(net->parameters()[place]);
    return tensors;
  }

  void send(size_t f) {
    at::Tensor sum = at::zeros_like(outer_[f]).to(at::kDouble);
    for (size_t machine = 0; machine < nets_.size(); ++machine) {
      const at::Tensor values = outer_[f] - flat(of(nets_[machine], case_.fragments[f])) + rests_[f][machine];
      const at::Tensor received = through(case_.options.wire, values);
      if (case_.options.error_feedback) rests_[f][machine] = values - received;
      sum += received.to(at::kDouble);
    }
    pending_[f] = (sum / static_cast<double>(nets_.size())).to(at::kFloat);
  }

  void apply(size_t f, double keep) {
    outer_[f].mutable_grad() = pending_[f];
    steps_[f]->step();
    sent_at_[f] = -1;
    const torch::NoGradGuard no_grad;
    for (Net& net : nets_) {
      int64_t offset = 0;
      for (at::Tensor& parameter : of(net, case_.fragments[f])) {
        const at::Tensor part = outer_[f].narrow(0, offset, parameter.numel()).view(parameter.sizes());
        offset += parameter.numel();
        keep == 0 ? parameter.copy_(part) : parameter.copy_(part + (parameter - part) * keep);
      }
    }
  }

  const Case case_;
  std::vector<Net> nets_;
  std::vector<std::unique_ptr<torch::optim::Adam>> inner_;
  std::vector<at::Tensor> outer_, pending_;
  std::vector<std::unique_ptr<ZeroRedundancyOptimizer<torch::optim::SGD>>> steps_;
  std::vector<int64_t> sent_at_;
  std::vector<std::vector<at::Tensor>> rests_;
};

const std::vector<std::vector<size_t>> kOne = {{0, 1, 2, 3}}, kTwo = {{0}, {1, 2, 3}}, kThree = {{0}, {2}, {1, 3}},
                                       kFour = {{0}, {2}, {1}, {3}};
const Engine kTwoMachines{2, "hierarchical", "ab"}, kThreeMachines{3, "hierarchical", "abc"},
    kFourMachines{4, "gloo", "abcd"};

const Case kCases[] = {
    {kTwoMachines, {.sync_every = 1, .fragments = 1}, kOne},
    {kTwoMachines, {.sync_every = 5, .fragments = 2}, kTwo},
    {kTwoMachines, {.sync_every = 2, .fragments = 4}, kFour},
    {kTwoMachines, {.sync_every = 5, .fragments = 1, .overlap_steps = 4, .mixing = 0.25}, kOne},
    {kTwoMachines, {.sync_every = 6, .fragments = 3, .overlap_steps = 1}, kThree},
    {kTwoMachines, {.sync_every = 6, .fragments = 3, .overlap_steps = 5, .mixing = 0}, kThree},
    {kTwoMachines, {.sync_every = 6, .fragments = 2, .overlap_steps = 5, .mixing = 1}, kTwo},
    {kTwoMachines, {.sync_every = 4, .fragments = 2, .wire = Wire::kBFloat16, .error_feedback = true}, kTwo},
    {kTwoMachines, {.sync_every = 4, .fragments = 2, .overlap_steps = 2, .wire = Wire::kInt8}, kTwo},
    {kTwoMachines,
     {.sync_every = 4, .fragments = 3, .overlap_steps = 3, .wire = Wire::kInt4, .error_feedback = true},
     kThree},
    {kThreeMachines, {.sync_every = 5, .fragments = 2, .overlap_steps = 3}, kTwo},
    {kFourMachines, {.sync_every = 4, .fragments = 4, .overlap_steps = 3}, kFour},
    {kFourMachines, {.sync_every = 3, .fragments = 1, .overlap_steps = 1}, kOne},
};

TEST(DiLoCoFragments, FollowTheFormulasWithTheSameBits) {
  for (const Case& one : kCases) {
    SCOPED_TRACE(name_of(one.engine) + " case " + std::to_string(&one - kCases));
    run_ranks(one.engine, [&](Context& context) {
      Training training(context, one.options);
      Reference reference(one, training.net);
      for (int step = 0; step < 17; ++step) {
        training.train_until(step + 1);
        reference.step(step);
        ASSERT_EQ(training.weights(), reference.weights(context.rank())) << "step " << step;
      }
    });
  }
}

/// With integers on more than two machines means are rounded as well; error feedback makes up for that, too.
TEST(DiLoCoFragments, WhatRoundingLosesComesLater) {
  for (const Engine& engine :
       {Engine{2, "gloo", "ab"}, Engine{3, "hierarchical", "abc"}, Engine{4, "hierarchical", "aabb"}})
    for (const Wire wire : {Wire::kBFloat16, Wire::kInt8, Wire::kInt4})
      run_ranks(engine, [&](Context& context) {
        const auto distance = [&](bool feedback) {
          // Parameters that each machine moves by the same in every step: the outer copy has to follow.
          const at::Tensor weight = at::zeros({300}).requires_grad_();
          DistributedDataParallel model(NamedTensors{{"weight", weight}}, context.group().on_this_machine());
          DiLoCo diloco(
              model, context,
              {.sync_every = 1, .wire = wire, .error_feedback = feedback, .outer_lr = 1, .outer_momentum = 0});
          const int machine = engine.machines[static_cast<size_t>(context.rank())] - 'a',
                    machines = engine.machines.back() - 'a' + 1;
          at::Tensor expected = at::zeros({300}, at::kDouble);
          torch::manual_seed(3);
          const at::Tensor moves = at::randn({machines, 300}) + 0.3;
          for (int step = 0; step < 60; ++step) {
            {
              const torch::NoGradGuard no_grad;
              weight.add_(moves[machine]);
            }
            diloco.step();
            expected += moves.to(at::kDouble).mean(0);
          }
          return (weight.detach() - expected).abs().mean().item<double>();
        };
        const double with = distance(true), without = distance(false);
        EXPECT_LT(with, without / 5) << diloco::name_of(wire);
        EXPECT_GT(without, 0);
      });
}

TEST(DiLoCoFragments, FinishMakesMachinesEqual) {
  for (const Case& one : kCases)
    for (const int steps : {0, 7})
      if (&one - kCases >= 3 && (&one - kCases) % 2 == 1)
        run_ranks(one.engine, [&](Context& context) {
          Training training(context, one.options);
          training.train_until(steps);
          training.diloco.finish();
          training.expect_equal(training.weights());
          const int64_t rounds = training.diloco.stats().rounds;
          training.diloco.finish();  // nothing is left
          EXPECT_EQ(training.diloco.stats().rounds, rounds);
          training.train_until(steps + 12);
          training.diloco.finish();
          training.expect_equal(training.weights());
        });
}

}  // namespace
}  // namespace lockstep::diloco_test
