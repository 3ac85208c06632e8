#include <functional>
#include <map>
#include <optional>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint.h>
#include <lockstep/comm_hook.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/ema.h>
#include <lockstep/grad_scaler.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "optim/wrong_optimizer.h"
#include "support/complaint.h"

// Programs that use an optimizer of several ranks incorrectly. Within two seconds, each must end on every rank with its
// message from wrong_optimizers.txt, and no parameter may have been stepped.

namespace lockstep::wrong_optimizers_test {
namespace {

const Programs& programs_that_make() {
  static const Programs kPrograms{
      {"sharing_differs", [](Wrong& w) { w.optimizer({.shared_parameters = w.odd}); }},
      {"edited_on_one_rank_before",
       [](Wrong& w) {
         if (w.odd) w.net->out->weight.data()[1][2] += 1e-3;
         w.optimizer();
       }},
      {"edited_on_one_rank_before_an_optimizer_of_its_own_formula",
       [](Wrong& w) {
         if (w.odd) w.net->out->weight.data()[1][2] += 1e-3;
         ZeroRedundancyOptimizer<Plain> plain(w.model, torch::optim::SGDOptions(0.1));
       }},
      {"loaded_on_one_rank_between_two_optimizers",
       [](Wrong& w) {
         {
           AdamW adamw = w.optimizer();
           w.backward();
           adamw.step();
         }
         StateDict other = copies_of(*w.net);
         other["fc.weight"].mul_(0.5);
         if (w.odd) load_state_dict(*w.net, other);
         w.optimizer();
       }},
      {"masters_differ", [](Wrong& w) { w.optimizer({.master_weights = w.odd}); }},
      {"kinds_differ",
       [](Wrong& w) {
         if (w.odd)
           ZeroRedundancyOptimizer(w.model, torch::optim::SGDOptions(0.1));
         else
           w.optimizer();
       }},
      {"parameter_in_no_group",
       [](Wrong& w) { AdamW(w.model, Groups{OptimizerParamGroup(w.net->fc->parameters())}, AdamWOptions(0.1)); }},
      {"parameter_of_another_model",
       [](Wrong& w) {
         const Net other;
         auto parameters = w.net->parameters();
         parameters.push_back(other->out->bias);
         AdamW(w.model, Groups{OptimizerParamGroup(parameters)}, AdamWOptions(0.1));
       }},
      {"undefined_tensor_in_a_group",
       [](Wrong& w) {
         auto parameters = w.net->parameters();
         parameters.insert(parameters.begin() + 1, at::Tensor());
         AdamW(w.model, Groups{OptimizerParamGroup(parameters)}, AdamWOptions(0.1));
       }},
      {"undefined_tensor_in_a_process_of_its_own",
       [](Wrong&) {
         AdamW({at::Tensor(), at::ones({2}).requires_grad_()}, AdamWOptions(0.1)).step();
       }},
      {"frozen_parameter_in_a_group",
       [](Wrong& w) {
         w.net->fc->bias.set_requires_grad(false);
         w.model.refresh();
         AdamW(w.model, Groups{OptimizerParamGroup(w.net->parameters())}, AdamWOptions(0.1));
       }},
      {"groups_in_another_order",
       [](Wrong& w) {
         Groups groups{OptimizerParamGroup(w.net->fc->parameters()), OptimizerParamGroup(w.net->out->parameters())};
         if (w.odd) std::swap(groups[0], groups[1]);
         AdamW(w.model, groups, AdamWOptions(0.1));
       }},
      {"two_parameters_of_equal_sizes_swapped",
       [](Wrong& w) {
         const auto net = w.twins();
         const DistributedDataParallel<Twins> model(net, w.context);
         std::vector<at::Tensor> parameters{net->p, net->q};
         if (w.odd) std::swap(parameters[0], parameters[1]);
         AdamW(model, Groups{OptimizerParamGroup(parameters)}, AdamWOptions(0.1));
       }},
      {"tied_by_set_data",
       [](Wrong& w) {
         const auto net = w.twins();
         const DistributedDataParallel<Twins> model(net, w.context);
         net->q.set_data(net->p.detach());
         AdamW(model, AdamWOptions(0.1));
       }},
      {"tied_by_set_data_in_slices",
       [](Wrong& w) {
         const auto net = w.twins();
         const DistributedDataParallel<Twins> model(net, w.context);
         net->q.set_data(net->p.detach());
         ZeroRedundancyOptimizer(model, torch::optim::RMSpropOptions(0.1));
       }},
      {"tied_to_an_ignored_one",
       [](Wrong& w) {
         const auto net = w.twins();
         const DistributedDataParallel<Twins> model(net, w.context, {.parameters_to_ignore = {"q"}});
         net->q.set_data(net->p.detach());
         AdamW(model, AdamWOptions(0.1));
       }},
      {"overlapping_parameters",
       [](Wrong& w) {
         w.net->out->bias.set_data(w.net->fc->bias.detach().narrow(0, 1, 3));
         w.optimizer();
       }},
      {"parameter_of_another_model_on_one_rank",
       [](Wrong& w) {
         const Net other;
         AdamW(w.model, Groups{OptimizerParamGroup((w.odd ? other : w.net)->parameters())}, AdamWOptions(0.1));
       }},
      {"averaged_shared_parameters",
       [](Wrong& w) {
         const AdamW adamw = w.optimizer({.shared_parameters = true});
         w.model.average_parameters();
       }},
      {"averaged_weights_of_shared_parameters",
       [](Wrong& w) {
         Ema ema(*w.net);
         const AdamW adamw = w.optimizer({.shared_parameters = true});
         const auto averaged = ema.averaged_weights();
       }},
  };
  return kPrograms;
}

const Programs& programs_that_step() {
  static const Programs kPrograms{
      {"rates_differ",
       [](Wrong& w) {
         w.spoil_step([&](AdamW& adamw) {
           if (w.odd) adamw.param_groups()[0].options().set_lr(0.2);
         });
       }},
      {"rates_of_shared_parameters_differ",
       [](Wrong& w) {
         const auto spoil = [&](AdamW& adamw) {
           if (w.odd) adamw.param_groups()[0].options().set_lr(0.2);
         };
         w.spoil_step(spoil, {.shared_parameters = true});
       }},
      {"state_loaded_on_one_rank",
       [](Wrong& w) {
         w.spoil_step([&](AdamW& adamw) {
           if (w.odd) load_state_dict(adamw, StateDict());
         });
       }},
      {"another_optimizer_steps",
       [](Wrong& w) {
         const AdamW adamw = w.optimizer();
         torch::optim::SGD sgd(w.net->parameters(), 0.1);
         w.backward();
         sgd.step();
         sgd.zero_grad();
         w.before = w.net->out->weight.detach().clone();
         w.backward();
       }},
      {"another_optimizer_steps_in_another_thread",
       [](Wrong& w) {
         const AdamW adamw = w.optimizer();
         torch::optim::SGD sgd(w.net->parameters(), 0.1);
         w.train_by(sgd, /*in_a_thread=*/true);
       }},
      {"another_optimizer_steps_what_is_shared",  // backward reduces here
       [](Wrong& w) {
         const ZeroRedundancyOptimizer rmsprop(w.model, torch::optim::RMSpropOptions(0.1), {.shared_parameters = true});
         torch::optim::SGD sgd(w.net->parameters(), 0.1);
         w.train_by(sgd);
       }},
      {"another_optimizer_steps_what_is_shared_with_a_hook",
       [](Wrong& w) {
         const AdamW adamw = w.optimizer({.shared_parameters = true});
         w.model.register_comm_hook(bf16_compress_hook());
         torch::optim::SGD sgd(w.net->parameters(), 0.1);
         w.train_by(sgd);
       }},
      {"another_optimizer_steps_right_after_what_is_shared",
       [](Wrong& w) {
         AdamW adamw = w.optimizer({.shared_parameters = true});
         w.step_also_by_sgd(adamw);
       }},
      {"another_optimizer_steps_right_after_slices_of_what_is_shared",
       [](Wrong& w) {
         ZeroRedundancyOptimizer rmsprop(w.model, torch::optim::RMSpropOptions(0.1), {.shared_parameters = true});
         w.step_also_by_sgd(rmsprop);
       }},
      {"another_optimizer_steps_what_is_shared_before_the_step",
       [](Wrong& w) {
         torch::optim::SGD sgd(w.net->parameters(), 0.1);
         w.spoil_step([&](AdamW&) { w.step_everywhere(sgd); }, {.shared_parameters = true});
       }},
      {"every_rank_changes_what_is_shared_before_the_first_step",
       [](Wrong& w) {
         AdamW adamw = w.optimizer({.shared_parameters = true});
         w.halve_everywhere();
         w.backward();
         adamw.step();
       }},
      {"a_part_of_a_state_after_every_rank_has_changed_what_is_shared",
       [](Wrong& w) {
         AdamW adamw = w.optimizer({.shared_parameters = true});
         w.halve_everywhere();
         load_state_dict(*w.net, StateDict(), {.strict = false});
         w.backward();
         adamw.step();
       }},
      {"every_rank_changes_what_is_shared",
       [](Wrong& w) { w.spoil_step([&](AdamW&) { w.halve_everywhere(); }, {.shared_parameters = true}); }},
      {"another_optimizer_steps_one_row",  // where no sample looks
       [](Wrong& w) {
         const AdamW adamw = w.optimizer();
         w.backward();
         {
           const at::NoGradGuard no_grad;
           w.net->fc->weight[1].slice(0, 1, 3).sub_(w.net->fc->weight.grad()[1].slice(0, 1, 3), 0.1);
         }
         w.net->zero_grad();
         w.before = w.net->out->weight.detach().clone();
         w.backward();
       }},
      {"clipped_between_two_passes",
       [](Wrong& w) {
         w.spoil_step([&](AdamW&) {
           torch::nn::utils::clip_grad_norm_(w.net->parameters(), 0.01);
           w.backward();
         });
       }},
      {"gradients_dropped_on_one_rank",
       [](Wrong& w) {
         w.spoil_step([&](AdamW& adamw) {
           if (w.odd) adamw.zero_grad();
         });
       }},
      {"one_gradient_dropped_on_one_rank",
       [](Wrong& w) {
         w.spoil_step([&](AdamW&) {
           if (w.odd) w.net->fc->bias.mutable_grad().reset();
         });
       }},
      {"rates_of_an_unknown_optimizer_differ",
       [](Wrong& w) {
         w.spoil_unknown([&](torch::optim::Optimizer& plain) {
           if (w.odd) plain.param_groups()[0].options().set_lr(0.2);
         });
       }},
      {"options_of_an_unknown_optimizer_differ",
       [](Wrong& w) {
         w.spoil_unknown([&](torch::optim::Optimizer& plain) {
           if (w.odd) static_cast<torch::optim::SGDOptions&>(plain.param_groups()[0].options()).momentum(0.5);
         });
       }},
      {"policies_differ",
       [](Wrong& w) {
         AdamW adamw = w.optimizer();
         if (w.odd) w.model.set_non_finite_policy(NonFinitePolicy::kSkip);
         w.before = w.net->out->weight.detach().clone();
         w.backward();
         adamw.step();
       }},
      {"scaler_enabled_on_some_ranks",
       [](Wrong& w) {
         torch::optim::SGD sgd(w.net->parameters(), 0.1);
         GradScaler scaler(w.context.group(), {.init_scale = 1024, .enabled = !w.odd});
         scaler.scale(w.model(at::ones({2, 6})).square().mean()).backward();
         scaler.step(sgd);
         w.context.group().barrier();
       }},
      {"scales_differ",
       [](Wrong& w) {
         torch::optim::SGD sgd(w.net->parameters(), 0.1);
         GradScaler scaler({.init_scale = w.odd ? 256.0 : 1024.0});
         w.before = w.net->out->weight.detach().clone();
         scaler.scale(w.model(at::ones({2, 6})).square().mean()).backward();
         scaler.step(sgd);
       }},
      {"scales_before_the_step_of_slices_differ",
       [](Wrong& w) {
         AdamW adamw = w.optimizer();
         GradScaler scaler({.init_scale = w.odd ? 256.0 : 1024.0});
         w.before = w.net->out->weight.detach().clone();
         scaler.scale(w.model(at::ones({2, 6})).square().mean()).backward();
         scaler.step(adamw);
       }},
      {"clipped_by_torch",
       [](Wrong& w) { w.spoil_step([&](AdamW&) { torch::nn::utils::clip_grad_norm_(w.net->parameters(), 0.01); }); }},
      {"gradient_replaced_on_one_rank",
       [](Wrong& w) {
         w.spoil_step([&](AdamW&) {
           if (w.odd) w.net->fc->bias.mutable_grad() = w.net->fc->bias.grad() * 2;
         });
       }},
      {"second_optimizer_on_one_rank",
       [](Wrong& w) {
         AdamW adamw = w.optimizer();
         w.backward();
         adamw.step();
         if (w.odd) const AdamW second = w.optimizer();
         w.backward();
         adamw.step();
       }},
      {"no_backward_on_one_rank",
       [](Wrong& w) {
         AdamW adamw = w.optimizer();
         w.backward();
         adamw.step();
         w.before = w.net->out->weight.detach().clone();
         if (!w.odd) w.backward();
         adamw.step();
       }},
      {"changed_on_one_rank",
       [](Wrong& w) {
         w.spoil_step([&](AdamW&) {
           if (w.odd) w.net->fc->bias.data().mul_(2);
         });
       }},
      {"one_element_changed_on_one_rank",
       [](Wrong& w) {
         w.model.check_divergence_every(1);
         w.spoil_step([&](AdamW&) {
           if (w.odd) w.net->fc->weight.data()[1][1].add_(1);
         });
       }},
      {"moved_from",
       [](Wrong& w) {
         w.spoil_step([&](AdamW& adamw) {
           const AdamW now(std::move(adamw));
           adamw.step();
         });
       }},
      {"gradients_that_wait",
       [](Wrong& w) {
         w.spoil_step([&](AdamW&) {
           const auto local = w.model.no_sync();
           w.backward();
         });
       }},
      {"gradients_that_wait_on_one_rank",
       [](Wrong& w) {
         w.spoil_step([&](AdamW&) {
           const auto local = w.model.no_sync();
           if (w.odd) w.backward();
         });
       }},
      {"converted", [](Wrong& w) { w.spoil_step([&](AdamW&) { w.net->fc->to(at::kDouble); }); }},
      {"replaced_data_on_one_rank",
       [](Wrong& w) {
         w.spoil_step([&](AdamW&) {
           if (w.odd) w.net->out->bias.set_data(at::ones({3}));
         });
       }},
      {"group_added",
       [](Wrong& w) {
         w.spoil_step([](AdamW& adamw) { adamw.add_param_group(OptimizerParamGroup({at::ones({2})})); });
       }},
      {"layer_added_and_refreshed",
       [](Wrong& w) {
         w.spoil_step([&](AdamW& adamw) {
           auto extra = w.net->register_module("extra", torch::nn::Linear(2, 2));
           w.model.refresh();
           adamw.add_param_group(OptimizerParamGroup(extra->parameters()));
         });
       }},
      {"clip_on_one_rank_alone",
       [](Wrong& w) {
         const AdamW adamw = w.optimizer();
         w.backward();
         if (w.odd) w.model.clip_grad_norm(1);
         w.context.group().barrier();
       }},
      {"step_on_one_rank_alone",
       [](Wrong& w) {
         const AdamW adamw = w.optimizer();
         w.backward();
         if (w.odd) const_cast<AdamW&>(adamw).step();
         w.context.group().barrier();
       }},
  };
  return kPrograms;
}

Programs all_programs() {
  Programs programs = programs_that_make();
  programs.insert(programs_that_step().begin(), programs_that_step().end());
  return programs;
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const auto& [name, program] : all_programs())
    for (const Engine& engine : {Engine{2, "shm"}, Engine{3, "shm"}, Engine{2, "gloo"}, Engine{3, "gloo"}})
      if (engine.backend == "shm" || name.find("shar") == std::string::npos) cases.push_back({name, engine});
  return cases;
}

class WrongOptimizers : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(All, WrongOptimizers, ::testing::ValuesIn(all_cases()), [](const auto& instance) {
  return instance.param.name + "_" + name_of(instance.param.engine);
});

TEST_P(WrongOptimizers, EndOnEveryRankWithTheirMessage) {
  expect_refused(GetParam(), all_programs().at(GetParam().name));
}

/// An optimizer that is declared before its model goes after it.
template <typename Options>
void outlive_the_model(Context& context, const Options& options) {
  using Optimizer = decltype(ZeroRedundancyOptimizer(std::declval<const Model&>(), options));
  std::optional<Optimizer> optimizer;
  const Net net;
  {
    Model model(net, context);
    optimizer.emplace(model, options);
    model(at::ones({2, 6})).square().mean().backward();
    optimizer->step();
  }
  const at::Tensor before = net->out->weight.detach().clone();
  const std::string text = complaint([&] { optimizer->step(); });
  EXPECT_NE(text.find("the DistributedDataParallel that it was made from was destroyed"), std::string::npos) << text;
  EXPECT_GT(state_dict(*optimizer).size(), 0u) << "what it remembers may still be saved";
  optimizer.reset();
  EXPECT_TRUE(net->out->weight.equal(before)) << "its memory is the module's own again";
}

/// Odd programs that are right: each of several steps ends.
void train_oddly(Context& context) {
  Wrong side(context);
  AdamW adamw = side.optimizer();
  Ema ema(*side.net);
  for (int step = 0; step < 20; ++step) {
    side.backward();
    if (step % 3 == 0) {  // a step that is given up, an evaluation of averages, a state that is loaded
      adamw.zero_grad(/*set_to_none=*/step % 2 == 0);
      if (step % 2 == 0) side.net->fc->bias.mutable_grad().reset();
      load_state_dict(*side.net, state_dict(*side.net));
      const auto averaged = ema.averaged_weights();
      continue;
    }
    if (step % 5 == 0) side.net->fc->bias.mutable_grad().reset();  // on every rank
    adamw.step();
    adamw.zero_grad();
    ema.update();
  }
  side.model.check_divergence();
}

TEST(WrongOptimizers, OddProgramsThatAreRightAreNone) {
  for (const Engine& engine : {Engine{2, "shm"}, Engine{3, "shm"}, Engine{2, "gloo"}, Engine{3, "gloo"}})
    run_ranks(engine.world_size, train_oddly, std::chrono::seconds(30), {.backend = engine.backend, .announce = false});
}

TEST(WrongOptimizers, MayOutliveTheirModelButNotStep) {
  for (const Engine& engine : {Engine{2, "shm"}, Engine{3, "shm"}, Engine{2, "gloo"}, Engine{3, "gloo"}})
    run_ranks(engine.world_size,
              [](Context& context) {
                outlive_the_model(context, torch::optim::AdamWOptions(0.1));
                outlive_the_model(context, torch::optim::RMSpropOptions(0.1));
              },
              std::chrono::seconds(30), {.backend = engine.backend, .announce = false});
}

}  // namespace
}  // namespace lockstep::wrong_optimizers_test
