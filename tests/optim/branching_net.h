#pragma once

#include <memory>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>

#include "support/ranks.h"

// A model for tests of steps that ranks share out.

namespace lockstep::testing {

/// `branch` is used in every other step, `never` by nobody, `frozen` does not train.
struct BranchingNet : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& input, int step) {
    torch::Tensor hidden = torch::tanh(first(input));
    if (step % 2 == 0) hidden = hidden + branch(input);
    return last(hidden) + frozen;
  }
  torch::nn::Linear first{register_module("first", torch::nn::Linear(20, 33))};
  torch::nn::Linear branch{register_module("branch", torch::nn::Linear(20, 33))};
  torch::nn::Linear never{register_module("never", torch::nn::Linear(3, 5))};
  torch::nn::Linear last{register_module("last", torch::nn::Linear(33, 7))};
  torch::Tensor frozen{register_parameter("frozen", torch::ones({7}), /*requires_grad=*/false)};
};
using Net = std::shared_ptr<BranchingNet>;

inline Net make_net(at::ScalarType type) {
  torch::manual_seed(3);
  auto net = std::make_shared<BranchingNet>();
  net->to(type);
  return net;
}

inline at::Tensor input_of(int rank, int step, at::ScalarType type) {
  return torch::sin(torch::arange(8 * 20, torch::kDouble).reshape({8, 20}) * (0.1 * (rank + 1)) + step).to(type);
}

/// Two groups, the second at another rate.
template <typename Options>
std::vector<OptimizerParamGroup> sharded_groups(BranchingNet& net, const Options& options) {
  Options other = options;
  other.lr(options.lr() * 0.5);
  std::vector<at::Tensor> weights, biases;
  for (const auto& item : net.named_parameters())
    if (item.value().requires_grad()) (item.value().dim() > 1 ? weights : biases).push_back(item.value());
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(weights, std::make_unique<Options>(options));
  groups.emplace_back(biases, std::make_unique<Options>(other));
  return groups;
}

/// What shares out a step: ranks with a copy of the parameters each or one for all, and ranks that share no memory.
struct Way {
  Engine engine;
  bool shared = false;
};
inline std::vector<Way> ways_of(int ranks) {
  if (ranks == 1) return {{{1, ""}, false}};
  return {{{ranks, "shm"}, false}, {{ranks, "shm"}, true}, {{ranks, "gloo"}, false}};
}

/// The same where ranks of several machines each have copies for their machine.
inline std::vector<Way> ways_with_machines(int ranks) {
  std::vector<Way> ways = ways_of(ranks);
  for (const bool shared : {false, true}) {
    if (ranks == 3) ways.push_back({{3, "hierarchical", "aab"}, shared});
    if (ranks == 4) ways.push_back({{4, "hierarchical", shared ? "aaab" : "aabb"}, shared});
  }
  return ways;
}

using ShardedModel = DistributedDataParallel<Net>;

inline at::Tensor loss_of(ShardedModel& model, int rank, int step) {
  const at::ScalarType type = model.module()->first->weight.scalar_type();
  return model(input_of(rank, step, type), step).square().mean();
}

inline void expect_same(const BranchingNet& mine, const BranchingNet& theirs) {
  const auto expected = theirs.named_parameters();
  for (const auto& item : mine.named_parameters()) EXPECT_TRUE(item.value().equal(expected[item.key()])) << item.key();
}

}  // namespace lockstep::testing
