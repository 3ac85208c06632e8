#pragma once

#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <lockstep/checkpoint.h>
#include <lockstep/diloco.h>
#include <lockstep/distributed_data_parallel.h>
#include <torch/torch.h>

#include "support/ranks.h"

namespace lockstep::diloco_test {

/// One, two and four machines; machines of different sizes, whose larger ones have ranks without a slice; other
/// engines.
inline const testing::Engine kMachines[] = {
    {4, "shm", "aaaa"},         {4, "hierarchical", "aabb"}, {4, "hierarchical", "abcd"},
    {2, "hierarchical", "ab"},  {3, "hierarchical", "aab"},  {4, "hierarchical", "abba"},
    {3, "hierarchical", "abc"}, {2, "gloo", "ab"},           {4, "gloo", "aabb"}};

/// Of sizes that no number of ranks divides, small enough to compute beside it, large enough for several blocks.
struct NetImpl : torch::nn::Module {
  torch::nn::Linear first{register_module("first", torch::nn::Linear(7, 19))};
  torch::nn::Linear second{register_module("second", torch::nn::Linear(19, 5))};
  at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(first(x))); }
};
TORCH_MODULE(Net);

inline at::Tensor data_of(int step, int rank) {
  torch::manual_seed(1000 * step + rank);
  return torch::randn({6, 7});
}

inline at::Tensor loss_of(Net& net, const at::Tensor& data) {
  return (net(data) - data.narrow(1, 0, 5).square()).square().mean();
}

/// A training on this rank. Machine 0's first rank decides what all begin with.
class Training {
 public:
  explicit Training(Context& context, const DiLoCoOptions& options, const torch::optim::AdamOptions& adam = {0.01})
      : rank_(context.rank()),
        group_(context.group()),
        optimizer_(seeded(net, context.rank())->parameters(), adam),
        model(net, group_.on_this_machine()),
        diloco(model, context, options) {}

  void train_until(int end) {
    for (; step_ < end; ++step_) {
      optimizer_.zero_grad();
      testing_loss().backward();
      optimizer_.step();
      diloco.step();
    }
  }
  at::Tensor testing_loss() { return loss_of(net, data_of(step_, rank_)); }
  torch::optim::Adam& optimizer() { return optimizer_; }
  int step() const { return step_; }
  void set_step(int step) { step_ = step; }
  std::string weights() const { return hash(state_dict(*net)); }
  /// Whether all ranks of all machines have the same.
  void expect_equal(const std::string& mine) const {
    for (const std::string& other : group_.all_gather_bytes(mine)) EXPECT_EQ(other, mine) << "step " << step_;
  }

  Net net;

 private:
  static Net& seeded(Net& net, int rank) {
    torch::manual_seed(rank);
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.uniform_(-0.5, 0.5);
    return net;
  }

  const int rank_;
  const Group group_;
  int step_ = 0;
  torch::optim::Adam optimizer_;

 public:
  DistributedDataParallel<Net> model;
  DiLoCo diloco;
};

/// A hash of the outer copies that all machines should have alike: of the slices that this rank has.
inline std::string outer_hash(DiLoCo& diloco) {
  StateDict outer;
  for (const auto& item : diloco.state_dict())
    if (item.key().find(".outer") != std::string::npos || item.key().find(".optimizer") != std::string::npos)
      outer.insert(item.key(), item.value());
  return hash(outer);
}

}  // namespace lockstep::diloco_test
