#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <optional>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

#include "support/ranks.h"
#include "support/wrong_table.h"

// Learning rates that would be something else than the program means: each is an error on all ranks, and no rate has
// changed.

namespace lockstep::wrong_schedules_test {
namespace {

using namespace testing;  // NOLINT
using torch::optim::AdamOptions;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN(), kInfinity = std::numeric_limits<double>::infinity();

class Points : public Dataset {
 public:
  int64_t size() const override { return 24; }
  Batch get(at::ArrayRef<int64_t> indices) const override {
    const at::Tensor data = at::tensor(indices, at::kLong).to(at::kFloat).unsqueeze(1).expand({-1, 4}).sin();
    return {data, data.sum(1, true)};
  }
};

/// One rank's side of a wrong program.
struct Wrong {
  explicit Wrong(Context& the_context) : context(the_context) {}

  /// `rate` and, for a class of LibTorch's, its options.
  template <typename Kind, typename Options>
  Optimizer& make(const Options& options) {
    optimizer = std::make_unique<Kind>(net->parameters(), options);
    return *optimizer;
  }
  Optimizer& sgd(double momentum = 0.9) { return make<torch::optim::SGD>(SGDOptions(0.1).momentum(momentum)); }
  LRScheduler& schedule(Schedule schedule) { return scheduler.emplace(*optimizer, std::move(schedule)); }
  /// Steps a schedule over SGD as often as it takes.
  void steps(Schedule of_steps, int count = 40) {
    sgd();
    schedule(std::move(of_steps));
    for (int i = 0; i < count; ++i) {
      before = rates();
      scheduler->step();
    }
    before.clear();
  }
  std::vector<double> rates() const {
    std::vector<double> all;
    for (const auto& group : optimizer->param_groups()) all.push_back(group.options().get_lr());
    return all;
  }
  /// LibTorch takes what equals its own defaults from the optimizer's, so the momentum is set afterwards.
  void add_group(const SGDOptions& options) const {
    const at::Tensor parameter = at::zeros({2}).requires_grad_();
    optimizer->add_param_group(OptimizerParamGroup({parameter}, std::make_unique<SGDOptions>(options)));
    static_cast<SGDOptions&>(optimizer->param_groups().back().options()).momentum(options.momentum());
  }
  void fit(TrainerOptions options, const std::function<void(Trainer&)>& edit = nullptr) {
    options.progress = false;
    Trainer trainer(net.ptr(), *optimizer, context, std::move(options));
    if (edit) edit(trainer);
    DataLoader loader(Points(), context, {.batch_size = 2});
    trainer.fit(loader, [&](Batch& batch) { return torch::mse_loss(net(batch.data), batch.target); });
  }

  Context& context;
  const bool odd = context.rank() == context.world_size() - 1;  ///< the last rank is the one that differs
  torch::nn::Linear net{4, 1};
  std::unique_ptr<Optimizer> optimizer;
  std::optional<LRScheduler> scheduler;
  std::vector<double> before;  ///< the rates that a refused call must leave alone; empty: there was none
};

using Programs = std::vector<TabledProgram<Wrong>>;

Schedule rate_at(int64_t at, double rate) {
  return {.rate = [=](double base, int64_t step) { return step == at ? rate : base; }};
}
Schedule momentum_at(int64_t at, double momentum) {
  return {.rate = [](double base, int64_t) { return base; },
          .momentum = [=](int64_t step) { return std::optional(step == at ? momentum : 0.9); }};
}
Schedule one_cycle(int64_t steps = 100) { return one_cycle_lr({.total_steps = steps}); }

Programs of_two_schedulers() {
  const std::string since = "LRScheduler: another LRScheduler was made for this optimizer later ... sequential_lr()";
  const std::string changed =
      "LRScheduler: another LRScheduler has set the learning rates ... sequential_lr() or warm_up()";
  return {
      {"both_step", since,
       [](Wrong& w) {
         LRScheduler first(w.sgd(), step_lr(30)), second(*w.optimizer, step_lr(3));
         second.step();
         first.step();
       }},
      {"the_older_loads", since,
       [](Wrong& w) {
         LRScheduler first(w.sgd(), step_lr(30)), second(*w.optimizer, step_lr(3));
         first.load_state_dict(second.state_dict());
       }},
      {"over_rates_of_another", changed,
       [](Wrong& w) {
         LRScheduler first(w.sgd(), warm_up(5, step_lr(3)));
         w.before = w.rates();
         LRScheduler second(*w.optimizer, step_lr(3));
       }},
      {"over_rates_that_have_fallen", changed,
       [](Wrong& w) {
         LRScheduler first(w.sgd(), exponential_lr(0.5));
         first.step();
         LRScheduler second(*w.optimizer, step_lr(3));
       }},
      {"a_copy_of_the_older_steps", since,
       [](Wrong& w) {
         LRScheduler first(w.sgd(), step_lr(30));
         LRScheduler copy = first;
         LRScheduler second(*w.optimizer, step_lr(3));
         copy.step();
       }},
      {"moved_from", "this LRScheduler was moved from",
       [](Wrong& w) {
         LRScheduler first(w.sgd(), step_lr(30));
         const LRScheduler second = std::move(first);
         first.step();  // NOLINT
       }},
      {"beside_the_trainers",
       "Trainer::fit(): LRScheduler: another LRScheduler has set the learning rates ... (on {all})",
       [](Wrong& w) {
         LRScheduler first(w.sgd(), warm_up(5, step_lr(3)));
         w.fit({.schedule = [](int64_t) { return step_lr(3); }});
       }},
      {"beside_the_trainers_on_one_rank", "Trainer::fit(): ranks have different options ... lr: ... {odd}",
       [](Wrong& w) {
         w.sgd();
         if (w.odd) w.schedule(warm_up(5, step_lr(3)));
         w.fit({.schedule = [](int64_t) { return step_lr(3); }});
       }},
      {"in_the_trainers_callback", since,
       [](Wrong& w) {
         LRScheduler first(w.sgd(), step_lr(3));
         w.fit({.schedule = [](int64_t) { return step_lr(3); }},
               [&](Trainer& trainer) { trainer.on_epoch([&](const EpochResult&) { first.step(); }); });
       }},
      {"one_after_the_other", "",
       [](Wrong& w) {
         w.sgd();
         for (int i = 0; i < 3; ++i) w.schedule(warm_up(5, step_lr(3))).step();
         w.scheduler.reset();
         w.fit({.schedule = [](int64_t) { return step_lr(3); }});
       }},
      {"copied_moved_and_returned", "",
       [](Wrong& w) {
         const auto made = [&] { return LRScheduler(w.sgd(), warm_up(5, step_lr(3))); };
         std::vector<LRScheduler> all;
         all.push_back(made());
         all.push_back(all[0]);
         LRScheduler moved = std::move(all[0]);
         moved.step();
         all[1].step();
         all = {moved};
         all[0].step();
       }},
      {"a_temporary_one", "",
       [](Wrong& w) {
         LRScheduler first(w.sgd(), step_lr(30));
         { LRScheduler(*w.optimizer, step_lr(3)).step(); }
         first.step();
       }},
      {"optimizers_at_one_address", "",  // the new scheduler is made while the old one still exists
       [](Wrong& w) {
         std::optional<torch::optim::SGD> optimizer;
         std::unique_ptr<LRScheduler> scheduler;
         for (int fold = 0; fold < 3; ++fold) {
           optimizer.emplace(w.net->parameters(), SGDOptions(0.1).momentum(0.9));
           scheduler = std::make_unique<LRScheduler>(*optimizer, warm_up(5, one_cycle()));
           for (int step = 0; step < 9; ++step) scheduler->step();
         }
       }},
      {"one_of_each_optimizer", "",
       [](Wrong& w) {
         torch::optim::SGD other({at::zeros({2})}, SGDOptions(0.1));
         LRScheduler first(w.sgd(), step_lr(30)), second(other, step_lr(3));
         first.step(), second.step(), first.step();
       }},
  };
}

Programs of_momentum() {
  const std::string without =
      "the schedule varies the momentum, but group 0 ... cycle_momentum = false ... .momentum(0.9)";
  return {
      {"one_cycle_over_plain_sgd", without, [](Wrong& w) { w.sgd(0), w.before = w.rates(), w.schedule(one_cycle()); }},
      {"one_cycle_over_plain_rmsprop", without,
       [](Wrong& w) {
         w.make<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.1));
         w.schedule(one_cycle());
       }},
      {"one_cycle_over_adam_without_first_moment", "the schedule varies the momentum, but group 0 ... .betas(",
       [](Wrong& w) {
         w.make<torch::optim::Adam>(AdamOptions(0.1).betas({0, 0.9}));
         w.schedule(one_cycle());
       }},
      {"one_cycle_over_adagrad",
       "the schedule varies the momentum, but this optimizer has none ... cycle_momentum = false",
       [](Wrong& w) {
         w.make<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.1));
         w.schedule(one_cycle());
       }},
      {"warm_up_before_one_cycle", without,
       [](Wrong& w) { w.sgd(0), w.before = w.rates(), w.schedule(warm_up(500, one_cycle(9000))); }},
      {"one_cycle_before_steps", without,
       [](Wrong& w) {
         w.sgd(0), w.schedule(sequential_lr({one_cycle(10), step_lr(3)}, {10}));
       }},
      {"in_the_trainer", "Trainer::fit(): the schedule varies the momentum, but group 0 ... (on {all})",
       [](Wrong& w) { w.sgd(0), w.fit({.schedule = [](int64_t steps) { return one_cycle(steps); }}); }},
      {"on_one_rank_in_the_trainer", "Trainer::fit(): ranks have different options ... momentum",
       [](Wrong& w) { w.sgd(w.odd ? 0 : 0.9), w.fit({.schedule = [](int64_t steps) { return one_cycle(steps); }}); }},
      {"the_second_group_has_none", "the schedule varies the momentum, but group 1 ",
       [](Wrong& w) {
         w.sgd();
         w.add_group(SGDOptions(0.1));
         w.schedule(one_cycle());
       }},
      {"a_group_that_comes_later_has_none", "the schedule varies the momentum, but group 1 ",
       [](Wrong& w) {
         w.sgd();
         w.schedule(one_cycle());
         w.add_group(SGDOptions(0.1));
         w.before = w.rates();
         w.scheduler->step();
       }},
      {"nan", "the momentum of group 0 of the optimizer is nan after 2 steps",
       [](Wrong& w) { w.steps(momentum_at(2, kNaN)); }},
      {"below_zero", "the momentum of group 0 of the optimizer is -0.1 after 1 step;",
       [](Wrong& w) { w.steps(momentum_at(1, -0.1)); }},
      {"a_beta_of_one", "the momentum of group 0 of the optimizer is 1 after 0 steps",
       [](Wrong& w) {
         w.make<torch::optim::Adam>(AdamOptions(0.1));
         w.schedule(momentum_at(0, 1));
       }},
      {"one_cycle_to_a_beta_of_two", "the momentum of group 0 of the optimizer is ",
       [](Wrong& w) {
         w.make<torch::optim::AdamW>(torch::optim::AdamWOptions(0.1));
         w.schedule(one_cycle_lr({.total_steps = 10, .max_momentum = 2}));
       }},
      {"no_cycle_over_plain_sgd", "",
       [](Wrong& w) {
         w.sgd(0);
         w.schedule(warm_up(3, one_cycle_lr({.total_steps = 20, .cycle_momentum = false})));
         for (int i = 0; i < 20; ++i) w.scheduler->step();
       }},
      {"a_warm_up_of_momentum_itself", "",
       [](Wrong& w) {
         w.steps({.rate = [](double base, int64_t) { return base; },
                  .momentum = [](int64_t step) { return std::optional(0.02 * static_cast<double>(step)); }});
       }},
      {"a_function_that_never_gives_one", "",
       [](Wrong& w) {
         w.sgd(0);
         w.schedule(
             {.rate = [](double base, int64_t) { return base; }, .momentum = [](int64_t) { return std::nullopt; }});
         w.scheduler->step();
       }},
  };
}

Programs of_rates() {
  const auto is = [](const std::string& rate, const std::string& steps) {
    return "the learning rate of group 0 of the optimizer is " + rate + " after " + steps;
  };
  return {
      {"nan", is("nan", "3 steps"), [](Wrong& w) { w.steps(rate_at(3, kNaN)); }},
      {"nan_at_first", is("nan", "0 steps"), [](Wrong& w) { w.steps(rate_at(0, kNaN)); }},
      {"infinite", is("inf", "1 step;"), [](Wrong& w) { w.steps(rate_at(1, kInfinity)); }},
      {"below_zero", is("-0.5", "2 steps"), [](Wrong& w) { w.steps(rate_at(2, -0.5)); }},
      {"gamma_nan", is("nan", "1 step;"), [](Wrong& w) { w.steps(exponential_lr(kNaN)); }},
      {"gamma_below_zero", is("- ... ", "3 steps"), [](Wrong& w) { w.steps(step_lr(3, -0.1)); }},
      {"power_below_zero", is("inf", "7 steps"), [](Wrong& w) { w.steps(polynomial_lr(7, -1)); }},
      {"eta_min_nan", is("nan", "0 steps"), [](Wrong& w) { w.steps(cosine_annealing_lr(9, kNaN)); }},
      {"eta_min_below_zero", is("- ... ", ""), [](Wrong& w) { w.steps(cosine_annealing_lr(9, -0.1)); }},
      {"restarts_to_below_zero", is("- ... ", ""),
       [](Wrong& w) { w.steps(cosine_annealing_warm_restarts(9, 2, -0.1)); }},
      {"div_factor_zero", is("inf", "0 steps"),
       [](Wrong& w) { w.steps(one_cycle_lr({.total_steps = 50, .div_factor = 0})); }},
      {"div_factor_below_zero", is("- ... ", "0 steps"),
       [](Wrong& w) { w.steps(one_cycle_lr({.total_steps = 50, .div_factor = -25})); }},
      {"final_div_factor_zero", "the learning rate of group 0 of the optimizer is ",
       [](Wrong& w) { w.steps(one_cycle_lr({.total_steps = 40, .final_div_factor = 0})); }},
      {"max_lr_nan", is("nan", "0 steps"),
       [](Wrong& w) { w.steps(one_cycle_lr({.total_steps = 50, .max_lr = kNaN})); }},
      {"one_of_two_groups", "the learning rate of group 1 of the optimizer is nan after 0 steps",
       [](Wrong& w) {
         w.sgd();
         w.add_group(SGDOptions(0.2));
         w.before = w.rates();
         LRScheduler(*w.optimizer, std::vector<Schedule>{step_lr(3), rate_at(0, kNaN)});
       }},
      {"base_nan", "the base learning rate of group 0 of the optimizer is nan",
       [](Wrong& w) {
         w.sgd().param_groups()[0].options().set_lr(kNaN);
         w.schedule(step_lr(3));
       }},
      {"base_below_zero", "the base learning rate of group 0 of the optimizer is -1",
       [](Wrong& w) {
         w.sgd().param_groups()[0].options().set_lr(-1);
         w.schedule(step_lr(3));
       }},
      {"a_group_that_comes_later", "the base learning rate of group 1 of the optimizer is nan after 1 step;",
       [](Wrong& w) {
         w.sgd();
         w.schedule(step_lr(3));
         w.add_group(SGDOptions(0.1));
         w.optimizer->param_groups()[1].options().set_lr(kNaN);
         w.scheduler->step();
       }},
      {"loaded_nan", "the state of the schedule: `base_lrs` has nan for group 0",
       [](Wrong& w) {
         w.sgd();
         auto state = w.schedule(step_lr(3)).state_dict().toGenericDict();
         c10::impl::GenericList bases(c10::AnyType::get());
         bases.push_back(kNaN);
         state.insert_or_assign(std::string("base_lrs"), bases);
         w.before = w.rates();
         w.scheduler->load_state_dict(state);
       }},
      {"loaded_beyond_the_end", "one_cycle_lr: step 50 of a cycle of 20 steps",
       [](Wrong& w) {
         w.sgd();
         auto state = w.schedule(one_cycle(20)).state_dict().toGenericDict();
         state.insert_or_assign(std::string("last_epoch"), int64_t{50});
         w.before = w.rates();
         w.scheduler->load_state_dict(state);
       }},
      {"beyond_the_end", "one_cycle_lr: step 21 of a cycle of 20 steps", [](Wrong& w) { w.steps(one_cycle(20)); }},
      {"beyond_the_end_in_the_trainer", "Trainer::fit(): one_cycle_lr: step ... of a cycle of 2 steps ... (on {all})",
       [](Wrong& w) { w.sgd(), w.fit({.epochs = 3, .schedule = [](int64_t) { return one_cycle(2); }}); }},
      {"nan_in_the_trainer", is("nan", "2 steps"),
       [](Wrong& w) { w.sgd(), w.fit({.schedule = [](int64_t) { return rate_at(2, kNaN); }}); }},
      {"nan_in_the_trainer_on_one_rank", "Trainer::fit(): ranks have different options ... schedule at step 2",
       [](Wrong& w) { w.sgd(), w.fit({.schedule = [&](int64_t) { return rate_at(2, w.odd ? kNaN : 0.1); }}); }},
      {"no_rate_in_the_trainer", "Trainer::fit(): the schedule has no rate function (on {all})",
       [](Wrong& w) { w.sgd(), w.fit({.schedule = [](int64_t) { return Schedule{}; }}); }},
      {"a_schedule_that_cannot_be_made_on_one_rank",
       "Trainer::fit(): step_lr: step_size must be above 0, not 0 (on {odd})",
       [](Wrong& w) { w.sgd(), w.fit({.schedule = [&](int64_t) { return step_lr(w.odd ? 0 : 3); }}); }},
      {"momentum_of_schedules_differs", "Trainer::fit(): ranks have different options ... , momentum: ",
       [](Wrong& w) { w.sgd(), w.fit({.schedule = [&](int64_t) { return momentum_at(1, w.odd ? 0.8 : 0.9); }}); }},
      {"no_rate_in_a_sequence", "sequential_lr: a schedule has no rate function",
       [](Wrong& w) {
         w.steps(sequential_lr({step_lr(3), Schedule{}}, {4}));
       }},
      {"no_rate_after_a_warm_up", "sequential_lr: a schedule has no rate function",
       [](Wrong& w) { w.steps(warm_up(3, Schedule{})); }},
      {"every_schedule_to_its_end", "",
       [](Wrong& w) {
         for (const Schedule& each :
              {cosine_annealing_lr(20), polynomial_lr(20), one_cycle(40), cosine_annealing_warm_restarts(7),
               linear_lr(0.1, 0, 20), constant_lr(0), exponential_lr(0), multi_step_lr({0, 0, 3}, 0)})
           w.steps(each);
       }},
      {"a_rate_of_zero", "",
       [](Wrong& w) {
         w.sgd().param_groups()[0].options().set_lr(0);
         w.schedule(step_lr(3)).step();
       }},
  };
}

class WrongSchedules : public ::testing::TestWithParam<Engine> {
 protected:
  static void expect(const Programs& programs) {
    run_ranks(GetParam(), [&](Context& context) {
      const auto make = [&](const std::string& name) {
        return std::unique_ptr<Wrong, std::function<void(Wrong*)>>(new Wrong(context), [name](Wrong* side) {
          if (!side->before.empty()) {
            EXPECT_EQ(side->rates(), side->before) << name << ": a refused call has set rates";
          }
          delete side;
        });
      };
      expect_each_told(context, programs, make);
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Engines, WrongSchedules, ::testing::ValuesIn(engines_of_wrong_programs()),
                         [](const auto& instance) { return name_of(instance.param); });

TEST_P(WrongSchedules, TwoOnOneOptimizer) { expect(of_two_schedulers()); }
TEST_P(WrongSchedules, MomentumThatThereIsNot) { expect(of_momentum()); }
TEST_P(WrongSchedules, RatesThatAreNone) { expect(of_rates()); }

}  // namespace
}  // namespace lockstep::wrong_schedules_test
