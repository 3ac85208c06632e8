#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/grad_scaler.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "data_parallel/models.h"
#include "support/ranks.h"
#include "support/wrong_table.h"

// Programs with a GradScaler, in tables.

namespace lockstep::wrong_scalers_test {

using namespace testing;  // NOLINT
using Sharded = ZeroRedundancyOptimizer<torch::optim::SGD>;

/// One rank's side of a program.
struct Side {
  explicit Side(Context& the_context) : context(the_context) {}

  at::Tensor loss(int step = 0) const { return loss_of(*model, batch(step, context.rank()), step, context.rank()); }
  at::Tensor weights() const { return torch::nn::utils::parameters_to_vector(model->parameters()).detach().clone(); }
  void backward(bool scaled, int step = 0) { (scaled ? scaler.scale(loss(step)) : loss(step)).backward(); }
  /// A whole step that is right.
  void train(torch::optim::Optimizer& by) {
    backward(true);
    EXPECT_TRUE(scaler.step(by));
    scaler.update();
    by.zero_grad();
  }
  /// Two passes and a step of `by`; `scaled`: the first one, on this rank.
  void accumulate(torch::optim::Optimizer& by, bool scaled) {
    train(by);
    before = weights();
    const auto accumulation = replica.accumulate(2);
    backward(scaled);
    backward(true, 1);
    scaler.step(by);
  }
  /// A step that all ranks leave out, among others.
  void leave_out(torch::optim::Optimizer& by) {
    train(by);
    replica.skip_step();
    const at::Tensor kept = weights();
    EXPECT_FALSE(scaler.step(by));
    scaler.update();
    EXPECT_TRUE(weights().equal(kept));
    EXPECT_EQ(replica.skipped_steps(), 1);
    train(by);
    EXPECT_FALSE(weights().equal(kept));
    EXPECT_EQ(tracked(), 2);
  }
  int64_t tracked() const { return scaler.state_dict().toGenericDict().at("_growth_tracker").toInt(); }

  Context& context;
  const bool odd = context.rank() == context.world_size() - 1;  ///< the last rank is the one that differs
  std::shared_ptr<Model> model = make_model("plain");
  DistributedDataParallel<std::shared_ptr<Model>> replica{model, context};
  torch::optim::SGD optimizer = make_sgd(*model);
  GradScaler scaler{{.init_scale = 1024}};
  at::Tensor before;  ///< what the refused step must leave alone; undefined: there was none
};

using Programs = std::vector<TabledProgram<Side>>;

class OfScalers : public ::testing::TestWithParam<Engine> {
 protected:
  static void expect(const Programs& programs) {
    run_ranks(GetParam(), [&](Context& context) {
      const auto make = [&](const std::string& name) {
        return std::unique_ptr<Side, std::function<void(Side*)>>(new Side(context), [name](Side* side) {
          if (side->before.defined()) {
            EXPECT_TRUE(side->weights().equal(side->before)) << name << ": a refused step has stepped";
          }
          delete side;
        });
      };
      expect_each_told(context, programs, make);
    });
  }
};

}  // namespace lockstep::wrong_scalers_test
