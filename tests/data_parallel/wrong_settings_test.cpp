#include <gtest/gtest.h>

#include <map>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "data_parallel/models.h"
#include "support/golden_cases.h"
#include "support/ranks.h"

// Replicas that one rank has set otherwise than the rest. Each program must end on every rank with its message from
// wrong_settings.txt, at the first reduction in which ranks differ. Programs in which ranks may differ end well.

namespace lockstep::wrong_settings_test {
namespace {

using namespace testing;  // NOLINT

struct Trained {
  explicit Trained(Context& the_context) : context(the_context), replica(net, context) { fill(*net); }

  const Context& context;
  torch::nn::Linear net{6, 3};
  DistributedDataParallel<torch::nn::Linear> replica;
  torch::optim::SGD optimizer{net->parameters(), 0.1};
  const bool odd = context.rank() == context.world_size() - 1;

  void train(int steps) {
    for (int step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      replica(batch(step, context.rank()).data).square().mean().backward();
      optimizer.step();
    }
  }
  void train_within(const JoinOptions& options) {
    replica.join([&] { train(odd ? 2 : 4); }, options);
  }
};

using Program = std::function<void(Trained&)>;

const std::map<std::string, Program>& programs() {
  static const std::map<std::string, Program> kPrograms{
      {"divergence_checked_on_one_rank",
       [](Trained& t) {
         if (t.odd) t.replica.check_divergence_every(2);
         t.train(4);
       }},
      {"divergence_checked_at_other_intervals",
       [](Trained& t) {
         t.replica.check_divergence_every(t.odd ? 300 : 2);
         t.train(1);
       }},
      {"buffers_as_left_on_one_rank",
       [](Trained& t) {
         t.replica.check_divergence_every(5, {.buffers_as_left = t.odd});
         t.train(1);
       }},
      {"join_divides_otherwise", [](Trained& t) { t.train_within({.divide_by_initial_world_size = !t.odd}); }},
      {"join_divides_otherwise_without_inputs",
       [](Trained& t) { t.replica.join([&] { t.train(t.odd ? 0 : 2); }, {.divide_by_initial_world_size = !t.odd}); }},
      {"join_throws_on_one_rank", [](Trained& t) { t.train_within({.throw_on_early_termination = t.odd}); }},
      {"join_switched_off_on_one_rank", [](Trained& t) { t.train_within({.enable = !t.odd}); }},
      {"join_on_one_rank",
       [](Trained& t) {
         if (t.odd)
           t.replica.join([&] { t.train(2); });
         else
           t.train(2);
       }},
      {"joined_on_one_rank_without_inputs",
       [](Trained& t) {
         if (t.odd)
           t.replica.join([] {});
         else
           t.train(2);
       }},
      {"frozen_on_one_rank",
       [](Trained& t) {
         t.train(2);
         if (t.odd) t.net->weight.requires_grad_(false);
         t.train(2);
       }},
      {"frozen_otherwise",
       [](Trained& t) {
         t.train(2);
         (t.odd ? t.net->weight : t.net->bias).requires_grad_(false);
         t.train(2);
       }},
      {"frozen_on_one_rank_within_join",
       [](Trained& t) {
         t.replica.join([&] {
           t.train(1);
           if (!t.odd) t.net->bias.requires_grad_(false);
           t.train(1);
         });
       }},
      {"frozen_on_one_rank_with_a_sharded_optimizer",
       [](Trained& t) {
         ZeroRedundancyOptimizer sharded(t.replica, torch::optim::AdamWOptions(0.01));
         for (int step = 0; step < 3; ++step) {
           if (t.odd && step == 2) t.net->weight.requires_grad_(false);
           sharded.zero_grad();
           t.replica(batch(step, t.context.rank()).data).square().mean().backward();
           sharded.step();
         }
       }},
  };
  return kPrograms;
}

class WrongSettings : public ::testing::TestWithParam<testing::GoldenCase> {};
INSTANTIATE_TEST_SUITE_P(All, WrongSettings, ::testing::ValuesIn(testing::golden_cases(programs())),
                         [](const auto& instance) { return name_of(instance.param); });

TEST_P(WrongSettings, EndOnEveryRankWithTheirMessage) {
  testing::expect_golden_case<Trained>(GetParam(), "tests/data_parallel/wrong_settings.txt",
                                       programs().at(GetParam().name));
}

class RightSettings : public ::testing::TestWithParam<std::pair<Engine, int>> {};
INSTANTIATE_TEST_SUITE_P(Engines, RightSettings,
                         ::testing::Values(std::pair(Engine{2, "shm"}, 0), std::pair(Engine{3, "shm"}, 0),
                                           std::pair(Engine{2, "gloo"}, 0), std::pair(Engine{3, "gloo"}, 0),
                                           std::pair(Engine{2, "shm"}, 5), std::pair(Engine{3, "gloo"}, 5)),
                         [](const auto& one) {
                           return name_of(one.param.first) + "_" + std::to_string(one.param.second);
                         });

TEST_P(RightSettings, MayChangeTogether) {
  const auto& [engine, virtual_ranks] = GetParam();
  const auto body = [](Context& context) {
    Trained t(context);
    const auto pass = [&](int steps) {
      const auto block = context.virtual_ranks() > 0 ? context.virtual_block() : Context::Block{0, 1};
      for (int step = 0; step < steps; ++step) {
        t.optimizer.zero_grad();
        for (int rank = block.first; rank < block.last; ++rank) {
          if (context.virtual_ranks() > 0) context.enter_virtual_rank(rank);
          t.replica(batch(step, context.rank()).data).square().mean().backward();
        }
        t.optimizer.step();
      }
    };
    t.replica.check_divergence_every(2, {.buffers_as_left = context.virtual_ranks() == 0});
    pass(3);
    t.net->bias.requires_grad_(false);
    pass(2);
    const at::Tensor frozen = t.net->bias.detach().clone();
    pass(1);
    EXPECT_TRUE(t.net->bias.equal(frozen));
    t.net->bias.requires_grad_(true);
    t.replica.check_divergence_every(0);
    pass(2);
    EXPECT_FALSE(t.net->bias.equal(frozen));
    // The rank without inputs does not come to where the others freeze.
    const JoinOptions divided{.divide_by_initial_world_size = false};
    t.replica.join(
        [&] {
          pass(1);
          if (t.odd) return;
          t.net->weight.requires_grad_(false);
          pass(2);
        },
        divided);
    t.net->weight.requires_grad_(false);
    pass(1);
    t.replica.refresh();
    t.replica.join([&] { pass(1); }, {.enable = false});
    t.replica.check_divergence();
  };
  run_ranks(engine.world_size, body, std::chrono::seconds(30),
            {.virtual_ranks = virtual_ranks,
             .collective_timeout = std::chrono::seconds(25),
             .backend = engine.backend,
             .announce = false});
}

}  // namespace
}  // namespace lockstep::wrong_settings_test
