#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/wrong_table.h"

// Ranks that train by different options, or step by different optimizers: each is an error on all ranks before the
// first step.

namespace lockstep::wrong_options_test {
namespace {

using namespace testing;  // NOLINT
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

class Points : public Dataset {
 public:
  int64_t size() const override { return 24; }
  Batch get(at::ArrayRef<int64_t> indices) const override {
    const at::Tensor data = at::tensor(indices, at::kLong).to(at::kFloat).unsqueeze(1).expand({-1, 4}).sin();
    return {data, data.sum(1, true)};
  }
};

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return out(torch::tanh(fc(x))); }
  torch::nn::Linear fc{register_module("fc", torch::nn::Linear(4, 4))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(4, 1))};
};
TORCH_MODULE(Net);

/// A user's own optimizer, whose learning rate is all that can be read.
struct OwnOptions : torch::optim::OptimizerCloneableOptions<OwnOptions> {
  explicit OwnOptions(double the_rate = 0.1) : rate(the_rate) {}
  double get_lr() const override { return rate; }
  void set_lr(const double lr) override { rate = lr; }
  double rate;
};
struct RatelessOptions : torch::optim::OptimizerCloneableOptions<RatelessOptions> {};
template <typename Options>
struct Own : Optimizer {
  Own(const std::vector<at::Tensor>& parameters, const Options& options)
      : Optimizer({OptimizerParamGroup(parameters)}, std::make_unique<Options>(options)) {}
  at::Tensor step(LossClosure = nullptr) override {
    const at::NoGradGuard no_grad;
    for (auto& group : param_groups())
      for (auto& parameter : group.params())
        if (parameter.grad().defined()) parameter.sub_(parameter.grad(), 0.01);
    return {};
  }
};

/// One rank's side of a wrong program.
struct Wrong {
  Wrong(Context& the_context, std::string the_folder) : context(the_context), folder(std::move(the_folder)) {}

  template <typename Kind, typename Options>
  void make(const Options& options) {
    optimizer = std::make_unique<Kind>(net->parameters(), options);
  }
  void fit(TrainerOptions options = {}) {
    options.progress = false;
    if (!optimizer) make<torch::optim::SGD>(SGDOptions(0.1).momentum(0.9));
    Trainer trainer(net.ptr(), *optimizer, context, std::move(options));
    DataLoader loader(Points(), context, {.batch_size = 2}), test(Points(), context, {.exactly_once = true});
    Metrics metrics;
    auto& error = metrics.add("error", Mean());
    if (evaluates) trainer.evaluate_on(test, metrics, [&](Batch&) { error.update(1.0); });
    int64_t batches = 0;
    try {
      trainer.fit(loader, [&](Batch& batch) {
        ++batches;
        return torch::mse_loss(net(batch.data), batch.target);
      });
    } catch (...) {
      EXPECT_EQ(batches, 0) << "the first batch was taken";
      throw;
    }
  }
  /// The last rank with `mine`, the others with `others`.
  void fit(TrainerOptions others, TrainerOptions mine) { fit(odd ? std::move(mine) : std::move(others)); }
  std::vector<at::Tensor> turned() const {
    auto parameters = net->parameters();
    if (odd) std::swap(parameters[0], parameters[2]);
    return parameters;
  }

  Context& context;
  const std::string folder;
  const bool odd = context.rank() == context.world_size() - 1;  ///< the last rank is the one that differs
  Net net;
  std::unique_ptr<Optimizer> optimizer;
  bool evaluates = true;
};

using Programs = std::vector<TabledProgram<Wrong>>;

/// "option 3 is `accumulate: 1` on rank 0 and `accumulate: 2` on rank 1".
std::string differ(const std::string& rest, const std::string& odd) {
  return "Trainer::fit(): ranks have different options: option  ... `" + rest + " ... ` on {rest} and `" + odd +
         " ... ` on {odd}";
}

Programs of_options() {
  const auto option = [](const std::string& rest, const std::string& odd, const TrainerOptions& others,
                         const TrainerOptions& mine) {
    return TabledProgram<Wrong>{odd, differ(rest, odd), [=](Wrong& w) { w.fit(others, mine); }};
  };
  const auto ema = [](const EmaOptions& options) { return TrainerOptions{.ema = options}; };
  const auto saves = [](const CheckpointerOptions& options) { return TrainerOptions{.checkpoints = options}; };
  const CheckpointerOptions plain{.every_minutes = 10};
  Programs programs{
      option("epochs: 1", "epochs: 2", {}, {.epochs = 2}),
      option("accumulate: 1", "accumulate: 2", {}, {.accumulate = 2}),
      option("clip_grad_norm: none", "clip_grad_norm: 1", {}, {.clip_grad_norm = 1}),
      option("clip_grad_norm: 1", "clip_grad_norm: 1.0000000000000002", {.clip_grad_norm = 1},
             {.clip_grad_norm = std::nextafter(1.0, 2)}),
      option("precision: kFloat", "precision: kBFloat16", {}, {.precision = Precision::kBFloat16}),
      option("precision: kBFloat16", "precision: kHalf", {.precision = Precision::kBFloat16},
             {.precision = Precision::kHalf}),
      option("ema: false", "ema: true", {}, ema({})),
      option("ema.decays: [0.9", "ema.decays: [0.8", ema({.decays = {0.9}}), ema({.decays = {0.8}})),
      option("ema.decays: [0.9", "ema.decays: [0.9", ema({.decays = {0.9}}), ema({.decays = {0.9, 0.99}})),
      option("ema.warm_up: false", "ema.warm_up: true", ema({}), ema({.warm_up = true})),
      option("ema.warmup_gamma: 1", "ema.warmup_gamma: 2", ema({}), ema({.warmup_gamma = 2})),
      option("ema.warmup_power: 0.5", "ema.warmup_power: 1", ema({.warmup_power = 0.5}), ema({.warmup_power = 1})),
      option("ema.min_decay: 0", "ema.min_decay: 0.5", ema({}), ema({.min_decay = 0.5})),
      option("ema.update_after_step: 0", "ema.update_after_step: 3", ema({}), ema({.update_after_step = 3})),
      option("ema.average_buffers: true", "ema.average_buffers: false", ema({}), ema({.average_buffers = false})),
      option("score: ", "score: error", {}, {.score = "error"}),
      option("patience: 0", "patience: 2", {.score = "error"}, {.score = "error", .patience = 2}),
      option("checkpoints.every_steps: none", "checkpoints.every_steps: 3", saves(plain),
             saves({.every_steps = 3, .every_minutes = 10})),
      option("checkpoints.every_minutes: 10", "checkpoints.every_minutes: none", saves(plain), saves({})),
      option("checkpoints.higher_is_better: true", "checkpoints.higher_is_better: false", saves(plain),
             saves({.every_minutes = 10, .higher_is_better = false})),
      option("checkpoints.memory_every_n_steps: none", "checkpoints.memory_every_n_steps: 1", saves(plain),
             saves({.every_minutes = 10, .memory_every_n_steps = 1})),
      option("checkpoints.disk_if_no_memory: false", "checkpoints.disk_if_no_memory: true", saves(plain),
             saves({.every_minutes = 10, .disk_if_no_memory = true})),
      option("checkpoints.replace_old_run: false", "checkpoints.replace_old_run: true", saves(plain),
             saves({.every_minutes = 10, .replace_old_run = true})),
      option("run_log: false", "run_log: true", {}, {.run_log = RunLogOptions{}}),
      {"folder", differ("folder: none", "folder: given"), [](Wrong& w) { w.fit({}, {.folder = w.folder}); }},
      {"schedule", differ("schedule: false", "schedule: true"),
       [](Wrong& w) { w.fit({}, {.schedule = [](int64_t) { return step_lr(3); }}); }},
      {"schedules", differ("schedule at step 3, for a rate of 1: 0.1", "schedule at step 3, for a rate of 1: 0.5"),
       [](Wrong& w) { w.fit({.schedule = [&](int64_t) { return multi_step_lr({3}, w.odd ? 0.5 : 0.1); }}); }},
      {"evaluates", differ("evaluate_on() called: true", "evaluate_on() called: false"),
       [](Wrong& w) {
         w.evaluates = !w.odd;
         w.fit();
       }},
      {"clips_to_nothing", "Trainer: clip_grad_norm is 0; it must be above 0, or unset",
       [](Wrong& w) { w.fit({.clip_grad_norm = 0}); }},
      {"clips_to_nan", "Trainer: clip_grad_norm is nan", [](Wrong& w) { w.fit({.clip_grad_norm = std::nan("")}); }},
      {"clips_to_below_zero", "Trainer: clip_grad_norm is -1", [](Wrong& w) { w.fit({.clip_grad_norm = -1}); }},
      {"checkpoints_to_keep",
       "ranks have different CheckpointerOptions: option 3 is `keep_last: 1` on {rest} and `keep_last: 2` on {odd}. "
       "Ranks save together, so every rank must give the same ones",
       [](Wrong& w) {
         const auto with = [&](int keep) {
           return TrainerOptions{.folder = w.folder,
                                 .checkpoints = {.every_minutes = 10, .keep_last = keep, .keep_best = keep}};
         };
         w.fit(with(1), with(2));
       }},
  };
  return programs;
}

Programs of_optimizers() {
  const auto sgd = [](const std::function<void(SGDOptions&)>& edit) {
    return [edit](Wrong& w) {
      SGDOptions options(0.1);
      options.momentum(0.9);
      if (w.odd) edit(options);
      w.make<torch::optim::SGD>(options);
      w.fit();
    };
  };
  const auto group = [](const std::string& rest, const std::string& odd) {
    return differ("optimizer's group 0, " + rest, "optimizer's group 0, " + odd);
  };
  return {
      {"class", differ("optimizer: torch::optim::AdamW", "optimizer: torch::optim::Adam"),
       [](Wrong& w) {
         if (w.odd)
           w.make<torch::optim::Adam>(AdamOptions(0.1));
         else
           w.make<torch::optim::AdamW>(AdamWOptions(0.1));
         w.fit();
       }},
      {"rate", group("lr: 0.1", "lr: 0.2"), sgd([](SGDOptions& options) { options.lr(0.2); })},
      {"rate_before_a_schedule_from_zero", group("lr: 0.1", "lr: 0.2"),
       [](Wrong& w) {
         w.make<torch::optim::SGD>(SGDOptions(w.odd ? 0.2 : 0.1));
         const Schedule from_zero{.rate = [](double base, int64_t step) { return step == 0 ? 0 : base; }};
         w.fit({.schedule = [=](int64_t) { return from_zero; }});
       }},
      {"momentum", group("momentum: 0.9", "momentum: 0.8"), sgd([](SGDOptions& options) { options.momentum(0.8); })},
      {"dampening", group("dampening: 0", "dampening: 0.5"), sgd([](SGDOptions& options) { options.dampening(0.5); })},
      {"decay", group("weight_decay: 0", "weight_decay: 0.01"),
       sgd([](SGDOptions& options) { options.weight_decay(0.01); })},
      {"nesterov", group("nesterov: ", "nesterov: "), sgd([](SGDOptions& options) { options.nesterov(true); })},
      {"betas", group("betas: ", "betas: "),
       [](Wrong& w) {
         w.make<torch::optim::Adam>(AdamOptions(0.1).betas({0.9, w.odd ? 0.99 : 0.999})), w.fit();
       }},
      {"eps", group("eps: ", "eps: "),
       [](Wrong& w) { w.make<torch::optim::Adam>(AdamOptions(0.1).eps(w.odd ? 1e-6 : 1e-8)), w.fit(); }},
      {"amsgrad", group("amsgrad: ", "amsgrad: "),
       [](Wrong& w) { w.make<torch::optim::Adam>(AdamOptions(0.1).amsgrad(w.odd)), w.fit(); }},
      {"a_rate_of_ones_own", group("lr: 0.1", "lr: 0.2"),
       [](Wrong& w) { w.make<Own<OwnOptions>>(OwnOptions(w.odd ? 0.2 : 0.1)), w.fit(); }},
      {"one_of_ones_own_without_a_rate", "",
       [](Wrong& w) { w.make<Own<RatelessOptions>>(RatelessOptions()), w.fit(); }},
      {"one_of_ones_own", "", [](Wrong& w) { w.make<Own<OwnOptions>>(OwnOptions(0.1)), w.fit(); }},
      {"a_parameter_fewer", group("parameters: 4", "parameters: 3"),
       [](Wrong& w) {
         auto parameters = w.net->parameters();
         if (w.odd) parameters.pop_back();
         w.optimizer = std::make_unique<torch::optim::SGD>(parameters, SGDOptions(0.1));
         w.fit();
       }},
      {"another_order", group("parameter 0: fc.weight", "parameter 0: out.weight"),
       [](Wrong& w) {
         w.optimizer = std::make_unique<torch::optim::SGD>(w.turned(), SGDOptions(0.1));
         w.fit();
       }},
      {"another_order_in_ones_own", group("parameter 0: fc.weight", "parameter 0: out.weight"),
       [](Wrong& w) {
         w.optimizer = std::make_unique<Own<OwnOptions>>(w.turned(), OwnOptions());
         w.fit();
       }},
      {"groups_in_another_order", group("parameter 0: fc.weight", "parameter 0: out.weight"),
       [](Wrong& w) {
         std::vector<OptimizerParamGroup> groups{OptimizerParamGroup(w.net->fc->parameters()),
                                                 OptimizerParamGroup(w.net->out->parameters())};
         if (w.odd) std::swap(groups[0], groups[1]);
         w.optimizer = std::make_unique<torch::optim::SGD>(groups, SGDOptions(0.1));
         w.fit();
       }},
      {"one_layer_or_the_other", group("parameter 0: fc.weight", "parameter 0: out.weight"),
       [](Wrong& w) {
         w.optimizer =
             std::make_unique<torch::optim::SGD>((w.odd ? w.net->out : w.net->fc)->parameters(), SGDOptions(0.1));
         w.fit();
       }},
      {"a_parameter_of_another_model", group("parameter 3: out.bias", "parameter 3, none of the module: [1]"),
       [](Wrong& w) {
         auto parameters = w.net->parameters();
         if (w.odd) parameters.back() = at::zeros({1}).requires_grad_();
         w.optimizer = std::make_unique<torch::optim::SGD>(parameters, SGDOptions(0.1));
         w.fit();
       }},
      {"a_group_more", differ("parameter groups: 1", "parameter groups: 2"),
       [](Wrong& w) {
         w.make<torch::optim::SGD>(SGDOptions(0.1));
         if (w.odd) w.optimizer->add_param_group(OptimizerParamGroup({at::zeros({2}).requires_grad_()}));
         w.fit();
       }},
      {"the_second_groups_rate", differ("optimizer's group 1, lr: 0.1", "optimizer's group 1, lr: 0.5"),
       [](Wrong& w) {
         std::vector<OptimizerParamGroup> groups{OptimizerParamGroup(w.net->fc->parameters()),
                                                 OptimizerParamGroup(w.net->out->parameters())};
         w.optimizer = std::make_unique<torch::optim::SGD>(groups, SGDOptions(0.1));
         if (w.odd) w.optimizer->param_groups()[1].options().set_lr(0.5);
         w.fit();
       }},
  };
}

class WrongOptions : public ::testing::TestWithParam<Engine> {
 protected:
  void expect(const Programs& programs) const {
    run_ranks(GetParam(), [&](Context& context) {
      const auto make = [&](const std::string& name) {
        return std::make_unique<Wrong>(context, (folder_.path() / name).string());
      };
      expect_each_told(context, programs, make);
    });
  }

  TemporaryFolder folder_;
};
INSTANTIATE_TEST_SUITE_P(Engines, WrongOptions, ::testing::ValuesIn(engines_of_wrong_programs()),
                         [](const auto& instance) { return name_of(instance.param); });

TEST_P(WrongOptions, OfTrainersThatDiffer) { expect(of_options()); }
TEST_P(WrongOptions, OfOptimizersThatDiffer) { expect(of_optimizers()); }

}  // namespace
}  // namespace lockstep::wrong_options_test
