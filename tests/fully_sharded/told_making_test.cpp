// What is wrong as a model or its optimizer is made, and told in words that name it.

#include <lockstep/fully_sharded_data_parallel.h>

#include <gtest/gtest.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/sharded_initialization.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "fully_sharded/small_gpt.h"
#include "support/golden_message.h"
#include "support/told_in_time.h"

namespace lockstep::told_making_test {
namespace {

using namespace testing;  // NOLINT
using torch::optim::SGDOptions;
using Sgd = ZeroRedundancyOptimizer<torch::optim::SGD>;

struct Side {
  explicit Side(Context& of) : context(of), odd(of.rank() == of.world_size() - 1) {}
  Context& context;
  const bool odd;
  SmallGpt net{3};
};

struct Program {
  std::string name;
  std::function<void(Side&)> run;
  bool on_one_machine = false;
};

/// Units of two sizes.
struct TwoSizesImpl : torch::nn::Module {
  TwoSizesImpl() {
    register_module("small", small);
    register_module("large", large);
  }
  at::Tensor forward(const at::Tensor& x) { return large(small(x)); }
  ShardedUnit<torch::nn::Linear> small{4, 4}, large{4, 40};
};
TORCH_MODULE(TwoSizes);

const std::vector<Program>& programs() {
  static const std::vector<Program> kPrograms{
      {"wraps_what_an_optimizer_holds",
       [](Side& side) {
         DistributedDataParallel replica(side.net, side.context);
         Sgd optimizer(replica, SGDOptions(0.1));
         FullyShardedDataParallel model(side.net, side.context);
       }},
      {"wraps_what_a_replica_holds",
       [](Side& side) {
         DistributedDataParallel replica(side.net, side.context);
         FullyShardedDataParallel model(side.net, side.context);
       }},
      {"replica_of_a_sharded_model",
       [](Side& side) {
         FullyShardedDataParallel model(side.net, side.context);
         DistributedDataParallel replica(side.net, side.context);
       }},
      {"layers_differ",
       [](Side& side) {
         SmallGpt net(side.odd ? 2 : 3);
         FullyShardedDataParallel model(net, side.context);
       }},
      {"optimizer_on_one_rank",
       [](Side& side) {
         FullyShardedDataParallel model(side.net, side.context);
         if (side.odd)
           Sgd optimizer(model, SGDOptions(0.1));
         else
           (void)model.hash();
       }},
      {"state_loaded_on_one_rank",
       [](Side& side) {
         SmallGpt other(3);
         FullyShardedDataParallel model(side.net, side.context);
         if (side.odd)
           model.load_state_dict(state_dict(*other));
         else
           (void)model.hash();
       }},
      {"second_optimizer_on_one_rank",
       [](Side& side) {
         FullyShardedDataParallel model(side.net, side.context);
         std::optional<Sgd> kept;
         for (int i = 0; i < 2; ++i) {
           if (!side.odd) kept.reset();
           Sgd made(model, SGDOptions(0.1));
           if (i == 0) kept.emplace(std::move(made));
         }
       }},
      {"groups_without_a_parameter_on_one_rank",
       [](Side& side) {
         FullyShardedDataParallel model(side.net, side.context);
         std::vector<at::Tensor> all;
         for (const at::Tensor& one : side.net->parameters())
           if (one.requires_grad()) all.push_back(one);
         if (side.odd) all.pop_back();
         (void)model.parts_of({torch::optim::OptimizerParamGroup(all)});
       }},
      {"master_weights_on_one_rank",
       [](Side& side) {
         FullyShardedDataParallel model(side.net, side.context);
         Sgd optimizer(model, SGDOptions(0.1), ZeroRedundancyOptions{.master_weights = side.odd});
       }},
      {"initialization_on_one_rank",
       [](Side& side) {
         std::optional<ShardedInitialization> part_by_part;
         if (side.odd) part_by_part.emplace(side.context);
         SmallGpt net(2);
         part_by_part.reset();
         FullyShardedDataParallel model(net, side.context);
       }},
      {"second_initialization_on_one_rank",
       [](Side& side) {
         std::optional<ShardedInitialization> first(side.context);
         if (!side.odd) first.reset();
         const ShardedInitialization second(side.context);
       }},
      {"layer_made_for_another_group",
       [](Side& side) {
         torch::nn::Sequential layers;
         {
           const ShardedInitialization part_by_part(side.context);
           layers->push_back(ShardedUnit<Block>(24));
         }
         const Group other = side.context.group().split(0);
         FullyShardedDataParallel model(layers.ptr(), other);
       }},
      {"sum_over_parameters_before_the_forward",
       [](Side& side) {
         FullyShardedDataParallel model(side.net, side.context);
         Sgd optimizer(model, SGDOptions(0.1));
         at::Tensor sum = at::zeros({});
         for (const at::Tensor& one : side.net->parameters()) sum = sum + one.pow(2).sum();
         (loss_of(model(text_of(0, 0)), text_of(0, 0)) + sum).backward();
       },
       /*on_one_machine=*/true},
  };
  return kPrograms;
}

TEST(ToldMaking, NamesWhatIsWrong) {
  for (const Engine& engine : kTellingEngines)
    for (const Program& program : programs()) {
      if (program.on_one_machine && engine.backend != "shm") continue;
      run_alike(engine, [&](Context& context) {
        const std::string of = name_of(engine) + ", rank " + std::to_string(context.rank()) + " of " + program.name;
        std::string said;
        Side side(context);
        context.group().barrier();
        const auto start = Clock::now();
        try {
          program.run(side);
        } catch (const c10::Error& error) {
          said = error.what_without_backtrace();
        } catch (const std::exception& error) {
          said = error.what();
        }
        expect_told_in_time(start, of);
        const std::string golden = golden_message("tests/fully_sharded/wrong_programs.txt", program.name, "");
        EXPECT_TRUE(!said.empty() && matches_golden(said, golden)) << of << " says\n" << said << "\nnot\n" << golden;
      });
    }
}

TEST(ToldMaking, ASumOverParametersAfterTheForwardIsRight) {
  for (const Engine& engine : {Engine{2, "shm"}, Engine{3, "shm"}})
    run_alike(engine, [](Context& context) {
      SmallGpt net(3), plain(3);
      FullyShardedDataParallel model(net, context);
      Sgd optimizer(model, SGDOptions(0.1));
      torch::optim::SGD alone(plain->parameters(), SGDOptions(0.1));
      const auto sum_of = [](const SmallGpt& of) {
        at::Tensor sum = at::zeros({});
        for (const at::Tensor& one : of->parameters()) sum = sum + one.pow(2).sum();
        return sum;
      };
      const at::Tensor loss = loss_of(model(text_of(0, 0)), text_of(0, 0));
      (loss + sum_of(net)).backward();
      optimizer.step();
      const at::Tensor expected = loss_of(plain(text_of(0, 0)), text_of(0, 0));
      (expected + sum_of(plain)).backward();
      alone.step();
      for (const auto& item : plain->named_parameters())
        EXPECT_TRUE(at::allclose(item.value(), net->named_parameters()[item.key()], 1e-4, 1e-6)) << item.key();
    });
}

TEST(ToldMaking, UnitsOfOtherSizesThatRanksGatherAreNamed) {
  for (const Engine& engine :
       {Engine{2, "gloo"}, Engine{3, "gloo"}, Engine{2, "hierarchical", "ab"}, Engine{3, "hierarchical", "abc"}})
    run_alike(engine, [](Context& context) {
      const torch::NoGradGuard no_grad;
      TwoSizes net;
      FullyShardedDataParallel model(net, context);
      const bool odd = context.rank() == context.world_size() - 1;
      const auto start = Clock::now();
      std::string said;
      try {
        (void)(odd ? net->large : net->small)(at::ones({2, 4}));
      } catch (const std::exception& error) {
        said = error.what();
      }
      expect_told_in_time(start);
      EXPECT_NE(said.find("the ranks use different units of a FullyShardedDataParallel: rank "), std::string::npos)
          << said;
      EXPECT_NE(said.find("the forward of `large`"), std::string::npos) << said;
    });
}

}  // namespace
}  // namespace lockstep::told_making_test
