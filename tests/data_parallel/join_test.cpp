#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "data_parallel/models.h"
#include "support/heard_warnings.h"
#include "support/ranks.h"

// Accumulations that have not ended when a rank's inputs end.

namespace lockstep::join_test {
namespace {

using namespace testing;  // NOLINT

class Joins : public ::testing::TestWithParam<Engine> {};
const Engine kJoinEngines[] = {{1, ""}, {2, "shm"}, {3, "shm"}, {2, "gloo"}, {3, "gloo"}, {3, "hierarchical", "aab"}};
INSTANTIATE_TEST_SUITE_P(Engines, Joins, ::testing::ValuesIn(kJoinEngines),
                         [](const auto& instance) { return name_of(instance.param); });

constexpr int kPasses = 3;

/// Passes: 3 + 1; 3 + 3 + 1; 3 + 3 + 2.
int passes_of(int rank) { return rank == 0 ? 4 : rank == 1 ? 7 : 8; }

/// What join() warns of while `body` runs in it.
std::vector<std::string> heard_in(Replica& model, const std::function<void()>& body, const JoinOptions& options) {
  const c10::WarningUtils::WarnAlways always;
  const testing::HeardWarnings heard;
  model.join(body, options);
  return heard.texts();
}

at::Tensor loss_of(Plain& net, int pass, int rank) {
  const Sample sample = batch(pass, rank);
  return torch::mse_loss(net.forward(sample.data, pass, rank), sample.target) / kPasses;
}

/// One process with the inputs of all ranks: what each step must be.
void train_alone(Plain& net, torch::optim::Optimizer& optimizer, int ranks, bool divide_by_all) {
  for (int first = 0; first < passes_of(ranks - 1); first += kPasses) {
    optimizer.zero_grad();
    int active = 0;
    for (int rank = 0; rank < ranks; ++rank) active += first < passes_of(rank) ? 1 : 0;
    for (int rank = 0; rank < ranks; ++rank)
      for (int pass = first; pass < std::min(first + kPasses, passes_of(rank)); ++pass)
        (loss_of(net, pass, rank) / (divide_by_all ? ranks : active)).backward();
    optimizer.step();
  }
}

/// A step of the rest, as the warning advises.
void reduce_rest(Replica& model, torch::optim::Optimizer& optimizer) {
  if (!model.step_complete()) {
    model.reduce_gradients();
    optimizer.step();
  }
}

TEST_P(Joins, ReduceTheRestOfAnAccumulationByReduceGradients) {
  run_ranks(GetParam(), [](Context& context) {
    const bool may_shard = context.group().backend() != "hierarchical";  // which refuses it within join()
    for (const bool sharded : {false, true})
      for (const bool divide_by_all : {true, false}) {
        if (sharded && !may_shard) continue;
        SCOPED_TRACE(std::to_string(sharded) + std::to_string(divide_by_all));
        const auto net = std::make_shared<Plain>(), reference = std::make_shared<Plain>();
        fill(*net), fill(*reference);
        Replica model(net, context.group());
        const auto sgd = torch::optim::SGDOptions(0.1).momentum(0.9);
        std::unique_ptr<torch::optim::Optimizer> optimizer;
        if (sharded)
          optimizer = std::make_unique<ZeroRedundancyOptimizer<torch::optim::SGD>>(model, sgd);
        else
          optimizer = std::make_unique<torch::optim::SGD>(net->parameters(), sgd);
        const auto body = [&] {
          const Accumulation accumulation = model.accumulate(kPasses);
          for (int pass = 0; pass < passes_of(context.rank()); ++pass) {
            loss_of(*net, pass, context.rank()).backward();
            if (!accumulation.complete()) continue;
            optimizer->step();
            optimizer->zero_grad();
          }
          reduce_rest(model, *optimizer);
        };
        const auto shadow = [&] {
          if (!sharded) optimizer->step();
          optimizer->zero_grad();
        };
        EXPECT_EQ(heard_in(model, body, {.divide_by_initial_world_size = divide_by_all, .shadow = shadow}),
                  std::vector<std::string>());
        torch::optim::SGD alone(reference->parameters(), sgd);
        train_alone(*reference, alone, context.world_size(), divide_by_all);
        for (size_t i = 0; i < net->parameters().size(); ++i)
          EXPECT_TRUE(at::allclose(net->parameters()[i], reference->parameters()[i], 1e-4, 1e-5)) << i;
      }
  });
}

TEST_P(Joins, WarnOfAnAccumulationThatHasNotEnded) {
  run_ranks(GetParam(), [](Context& context) {
    Plain net;
    fill(net);
    const auto shared = std::make_shared<Plain>(net);
    Replica model(shared, context.group());
    const int rank = context.rank(), world_size = context.world_size();
    const auto run = [&](int passes, const std::function<void()>& at_end = nullptr) {
      return heard_in(model,
                      [&] {
                        const Accumulation accumulation = model.accumulate(kPasses);
                        for (int pass = 0; pass < passes; ++pass) loss_of(*shared, pass, rank).backward();
                        if (at_end) at_end();
                      },
                      {});
    };
    const std::string name = "rank " + std::to_string(rank) + " of " + std::to_string(world_size);
    const auto expected = [&](const std::string& passes) {
      return std::vector<std::string>{
          name + ": the inputs of join() ended after " + passes +
          " of accumulate(3), whose gradients are dropped. To count them, end the body with: if "
          "(!model.step_complete()) { model.reduce_gradients(); optimizer.step(); }"};
    };
    const std::vector<std::string> nothing;
    // Only where it happens. A world of one drops nothing: the next backward goes on with the accumulation.
    const auto heard = run(rank == 0 ? 4 : 6);
    EXPECT_EQ(heard, rank == 0 && world_size > 1 ? expected("1 backward pass") : nothing);
    model.reduce_gradients();
    EXPECT_EQ(run(5), world_size > 1 ? expected("2 backward passes") : nothing);
    model.reduce_gradients();
    EXPECT_EQ(run(3), nothing) << "it has ended";
    EXPECT_EQ(run(0), nothing);
    const auto clear = [&] {
      for (const at::Tensor& parameter : shared->parameters()) parameter.mutable_grad().reset();
    };
    EXPECT_EQ(run(4, clear), nothing) << "the program has dropped them itself";
    model.reduce_gradients();
    // Passes within no_sync() alone, as a critic's in a generator's step, are the program's own.
    EXPECT_EQ(heard_in(model,
                       [&] {
                         loss_of(*shared, 0, rank).backward();
                         const NoSyncGuard guard = model.no_sync();
                         loss_of(*shared, 1, rank).backward();
                       },
                       {}),
              nothing);
  });
}

}  // namespace
}  // namespace lockstep::join_test
