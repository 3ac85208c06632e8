#include "train_c/recipe.h"

#include <utility>

#include <torch/optim.h>

#include "train_c/guarded.h"
#include "train_c/losses.h"

namespace lockstep::train_c {
namespace {

Schedule named_schedule(const std::string& name, Settings& of) {
  if (name == "constant")
    return constant_lr(of.number("factor").value_or(1.0 / 3), of.whole("total_iters", 0).value_or(5));
  if (name == "linear")
    return linear_lr(of.number("start_factor").value_or(1.0 / 3), of.number("end_factor").value_or(1),
                     of.whole("total_iters", 1).value_or(5));
  if (name == "step") return step_lr(of.required_whole("step_size", 1), of.number("gamma").value_or(0.1));
  if (name == "multi_step") {
    std::optional<std::vector<int64_t>> milestones = of.wholes("milestones");
    if (!milestones) of.refuse_entry("milestones", "a multi_step schedule needs them");
    return multi_step_lr(*std::move(milestones), of.number("gamma").value_or(0.1));
  }
  if (name == "exponential") return exponential_lr(of.required_number("gamma"));
  if (name == "polynomial") return polynomial_lr(of.required_whole("total_iters", 1), of.number("power").value_or(1));
  if (name == "cosine_annealing")
    return cosine_annealing_lr(of.required_whole("t_max", 1), of.number("eta_min").value_or(0));
  if (name == "cosine_annealing_warm_restarts")
    return cosine_annealing_warm_restarts(of.required_whole("t_0", 1), of.whole("t_mult", 1).value_or(1),
                                          of.number("eta_min").value_or(0));
  if (name == "one_cycle") {
    OneCycleOptions options{.total_steps = of.required_whole("total_steps", 1)};
    options.max_lr = of.number("max_lr");
    options.pct_start = of.number("pct_start").value_or(options.pct_start);
    options.cycle_momentum = of.flag("cycle_momentum").value_or(options.cycle_momentum);
    options.div_factor = of.number("div_factor").value_or(options.div_factor);
    options.final_div_factor = of.number("final_div_factor").value_or(options.final_div_factor);
    return one_cycle_lr(options);
  }
  of.refuse_entry("type",
                  "known are constant, linear, step, multi_step, exponential, polynomial, cosine_annealing, "
                  "cosine_annealing_warm_restarts and one_cycle");
}

std::optional<Schedule> schedule_of(Settings& settings) {
  std::optional<Settings> of = settings.part("lr_scheduler");
  if (!of) return std::nullopt;
  Schedule schedule = named_schedule(of->required_text("type"), *of);
  if (const auto steps = of->whole("warm_up", 1)) schedule = warm_up(*steps, std::move(schedule));
  of->finish();
  return schedule;
}

CheckpointerOptions checkpoints_of(Settings& settings) {
  CheckpointerOptions options;
  std::optional<Settings> of = settings.part("checkpoint");
  if (!of) return options;
  options.every_steps = of->whole("every_steps", 1);
  options.every_minutes = of->number("every_minutes");
  options.keep_last =
      static_cast<int>(std::min<int64_t>(of->whole("keep_last", 1).value_or(options.keep_last), 1 << 20));
  options.asynchronous = of->flag("asynchronous").value_or(options.asynchronous);
  options.memory_every_n_steps = of->whole("memory_every_n_steps", 1);
  options.disk_if_no_memory = of->flag("disk_if_no_memory").value_or(options.disk_if_no_memory);
  options.replace_old_run = of->flag("replace_old_run").value_or(options.replace_old_run);
  of->finish();
  return options;
}

std::optional<at::ScalarType> dtype_of(Settings& settings) {
  const std::optional<std::string> name = settings.text("dtype");
  if (!name) return std::nullopt;
  if (*name == "float32") return at::kFloat;
  if (*name == "float64") return at::kDouble;
  if (*name == "bfloat16") return at::kBFloat16;
  settings.refuse_entry("dtype", "give float32, float64 or bfloat16");
}

/// The entries that several optimizers have.
template <typename Options>
Options with_decay(Settings& of, Options options) {
  options.weight_decay(of.number("weight_decay").value_or(options.weight_decay()));
  return options;
}
template <typename Options>
Options adam_options(Settings& of, Options options) {
  const auto [beta1, beta2] = options.betas();
  options.betas({of.number("beta1").value_or(beta1), of.number("beta2").value_or(beta2)});
  options.eps(of.number("eps").value_or(options.eps())).amsgrad(of.flag("amsgrad").value_or(false));
  return with_decay(of, std::move(options));
}

std::unique_ptr<torch::optim::Optimizer> named_optimizer(const std::string& name, Settings& of,
                                                         std::vector<at::Tensor> parameters) {
  namespace optim = torch::optim;
  const double lr = of.number("lr").value_or(1e-3);
  if (name == "sgd") {
    optim::SGDOptions options = with_decay(of, optim::SGDOptions(lr));
    options.momentum(of.number("momentum").value_or(0)).dampening(of.number("dampening").value_or(0));
    options.nesterov(of.flag("nesterov").value_or(false));
    return std::make_unique<optim::SGD>(std::move(parameters), options);
  }
  if (name == "adam")
    return std::make_unique<optim::Adam>(std::move(parameters), adam_options(of, optim::AdamOptions(lr)));
  if (name == "adamw")
    return std::make_unique<optim::AdamW>(std::move(parameters), adam_options(of, optim::AdamWOptions(lr)));
  if (name == "rmsprop") {
    optim::RMSpropOptions options = with_decay(of, optim::RMSpropOptions(lr));
    options.alpha(of.number("alpha").value_or(options.alpha())).eps(of.number("eps").value_or(options.eps()));
    options.momentum(of.number("momentum").value_or(0)).centered(of.flag("centered").value_or(false));
    return std::make_unique<optim::RMSprop>(std::move(parameters), options);
  }
  if (name == "adagrad") {
    optim::AdagradOptions options = with_decay(of, optim::AdagradOptions(lr));
    options.lr_decay(of.number("lr_decay").value_or(0)).eps(of.number("eps").value_or(options.eps()));
    options.initial_accumulator_value(of.number("initial_accumulator_value").value_or(0));
    return std::make_unique<optim::Adagrad>(std::move(parameters), options);
  }
  of.refuse_entry("type", "known are sgd, adam, adamw, rmsprop and adagrad");
}

}  // namespace

Recipe recipe_of(Settings& settings) {
  Recipe recipe;
  choose_loss(settings, recipe);
  recipe.schedule = schedule_of(settings);
  recipe.dtype = dtype_of(settings);
  recipe.weight_by_rows = settings.flag("weight_by_rows").value_or(false);
  if (recipe.weight_by_rows && recipe.is_sum)
    settings.refuse_entry("weight_by_rows", "a loss that is a sum needs no weights");
  const int64_t accumulate = settings.whole("accumulate", 1).value_or(1);
  if (accumulate > 1 << 30) settings.refuse_entry("accumulate", "give less than 2^30");
  recipe.accumulate = static_cast<int>(accumulate);
  recipe.max_grad_norm = settings.number("max_grad_norm");
  if (recipe.max_grad_norm && !(*recipe.max_grad_norm > 0)) settings.refuse_entry("max_grad_norm", "give more than 0");
  recipe.check_equal_every =
      static_cast<int>(std::min<int64_t>(settings.whole("check_equal_every", 0).value_or(0), 1 << 30));
  recipe.checkpoints = checkpoints_of(settings);
  recipe.log = settings.text("log").value_or("");
  return recipe;
}

std::unique_ptr<torch::optim::Optimizer> optimizer_of(Settings& settings, std::vector<at::Tensor> parameters) {
  std::optional<Settings> of = settings.part("optimizer");
  if (!of) refuse("the configuration", "it has no optimizer, which is required");
  auto optimizer = named_optimizer(of->required_text("type"), *of, std::move(parameters));
  of->finish();
  settings.finish();
  return optimizer;
}

}  // namespace lockstep::train_c
