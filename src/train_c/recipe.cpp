#include "train_c/recipe.h"

#include <map>
#include <utility>

#include <torch/optim.h>

#include "train_c/guarded.h"

namespace lockstep::train_c {
namespace {

Schedule named_schedule(const std::string& name, Settings& of) {
  if (name == "constant") return constant_lr(of.number("factor", 1.0 / 3), of.whole("total_iters", 0, 5));
  if (name == "linear")
    return linear_lr(of.number("start_factor", 1.0 / 3), of.number("end_factor", 1), of.whole("total_iters", 1, 5));
  if (name == "step") return step_lr(of.required_whole("step_size", 1), of.number("gamma", 0.1));
  if (name == "multi_step") {
    std::optional<std::vector<int64_t>> milestones = of.wholes("milestones");
    if (!milestones) of.refuse_entry("milestones", "a multi_step schedule needs them");
    return multi_step_lr(*std::move(milestones), of.number("gamma", 0.1));
  }
  if (name == "exponential") return exponential_lr(of.required_number("gamma"));
  if (name == "polynomial") return polynomial_lr(of.required_whole("total_iters", 1), of.number("power", 1));
  if (name == "cosine_annealing") return cosine_annealing_lr(of.required_whole("t_max", 1), of.number("eta_min", 0));
  if (name == "cosine_annealing_warm_restarts")
    return cosine_annealing_warm_restarts(of.required_whole("t_0", 1), of.whole("t_mult", 1, 1),
                                          of.number("eta_min", 0));
  if (name == "one_cycle") {
    OneCycleOptions options{.total_steps = of.required_whole("total_steps", 1)};
    options.max_lr = of.number("max_lr");
    options.pct_start = of.number("pct_start", options.pct_start);
    options.cycle_momentum = of.flag("cycle_momentum", options.cycle_momentum);
    options.div_factor = of.number("div_factor", options.div_factor);
    options.final_div_factor = of.number("final_div_factor", options.final_div_factor);
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
  Settings of = settings.part_or_empty("checkpoint");
  options.every_steps = of.whole("every_steps", 1);
  options.every_minutes = of.number("every_minutes");
  options.keep_last = static_cast<int>(std::min<int64_t>(of.whole("keep_last", 1, options.keep_last), 1 << 20));
  options.asynchronous = of.flag("asynchronous", options.asynchronous);
  options.memory_every_n_steps = of.whole("memory_every_n_steps", 1);
  options.disk_if_no_memory = of.flag("disk_if_no_memory", options.disk_if_no_memory);
  options.replace_old_run = of.flag("replace_old_run", options.replace_old_run);
  of.finish();
  return options;
}

std::optional<DiLoCoOptions> diloco_of(Settings& settings) {
  std::optional<Settings> of = settings.part("diloco", /*takes_name=*/false);
  if (!of) return std::nullopt;
  DiLoCoOptions options;
  options.sync_every = of->whole("sync_every", 1, options.sync_every);
  options.fragments = of->whole("fragments", 1, options.fragments);
  options.overlap_steps = of->whole("overlap_steps", 0, options.overlap_steps);
  if (options.overlap_steps >= options.sync_every)
    of->refuse_entry("overlap_steps", "give less than sync_every, " + std::to_string(options.sync_every));
  options.mixing = of->number("mixing", options.mixing);
  if (options.mixing < 0 || options.mixing > 1) of->refuse_entry("mixing", "give 0 to 1");
  const std::string wire = of->text("wire", "fp32");
  const std::map<std::string, Wire> wires{
      {"fp32", Wire::kFloat32}, {"bf16", Wire::kBFloat16}, {"int8", Wire::kInt8}, {"int4", Wire::kInt4}};
  if (!wires.contains(wire)) of->refuse_entry("wire", "give fp32, bf16, int8 or int4");
  options.wire = wires.at(wire);
  options.error_feedback = of->flag("error_feedback", options.error_feedback);
  options.outer_lr = of->number("outer_lr", options.outer_lr);
  if (!(options.outer_lr > 0)) of->refuse_entry("outer_lr", "give more than 0");
  options.outer_momentum = of->number("outer_momentum", options.outer_momentum);
  if (options.outer_momentum < 0 || options.outer_momentum >= 1)
    of->refuse_entry("outer_momentum", "give at least 0, and less than 1");
  options.nesterov = of->flag("nesterov", options.nesterov);
  options.max_nonfinite_rounds = of->whole("max_nonfinite_rounds", 1, options.max_nonfinite_rounds);
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
  options.weight_decay(of.number("weight_decay", options.weight_decay()));
  return options;
}
template <typename Options>
Options adam_options(Settings& of, Options options) {
  const auto [beta1, beta2] = options.betas();
  options.betas({of.number("beta1", beta1), of.number("beta2", beta2)});
  options.eps(of.number("eps", options.eps())).amsgrad(of.flag("amsgrad", false));
  return with_decay(of, std::move(options));
}

std::unique_ptr<torch::optim::Optimizer> named_optimizer(const std::string& name, Settings& of,
                                                         std::vector<at::Tensor> parameters) {
  namespace optim = torch::optim;
  const double lr = of.number("lr", 1e-3);
  if (name == "sgd") {
    optim::SGDOptions options = with_decay(of, optim::SGDOptions(lr));
    options.momentum(of.number("momentum", 0)).dampening(of.number("dampening", 0));
    options.nesterov(of.flag("nesterov", false));
    return std::make_unique<optim::SGD>(std::move(parameters), options);
  }
  if (name == "adam")
    return std::make_unique<optim::Adam>(std::move(parameters), adam_options(of, optim::AdamOptions(lr)));
  if (name == "adamw")
    return std::make_unique<optim::AdamW>(std::move(parameters), adam_options(of, optim::AdamWOptions(lr)));
  if (name == "rmsprop") {
    optim::RMSpropOptions options = with_decay(of, optim::RMSpropOptions(lr));
    options.alpha(of.number("alpha", options.alpha())).eps(of.number("eps", options.eps()));
    options.momentum(of.number("momentum", 0)).centered(of.flag("centered", false));
    return std::make_unique<optim::RMSprop>(std::move(parameters), options);
  }
  if (name == "adagrad") {
    optim::AdagradOptions options = with_decay(of, optim::AdagradOptions(lr));
    options.lr_decay(of.number("lr_decay", 0)).eps(of.number("eps", options.eps()));
    options.initial_accumulator_value(of.number("initial_accumulator_value", 0));
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
  recipe.weight_by_rows = settings.flag("weight_by_rows", false);
  if (recipe.weight_by_rows && recipe.is_sum)
    settings.refuse_entry("weight_by_rows", "a loss that is a sum needs no weights");
  const int64_t accumulate = settings.whole("accumulate", 1, 1);
  if (accumulate > 1 << 30) settings.refuse_entry("accumulate", "give less than 2^30");
  recipe.accumulate = static_cast<int>(accumulate);
  recipe.max_grad_norm = settings.number("max_grad_norm");
  if (recipe.max_grad_norm && !(*recipe.max_grad_norm > 0)) settings.refuse_entry("max_grad_norm", "give more than 0");
  recipe.check_equal_every = static_cast<int>(std::min<int64_t>(settings.whole("check_equal_every", 0, 0), 1 << 30));
  recipe.diloco = diloco_of(settings);
  recipe.checkpoints = checkpoints_of(settings);
  recipe.log = settings.text("log", "");
  return recipe;
}

void check_diloco(const Settings& settings, const Recipe& recipe, const std::vector<at::Tensor>& parameters) {
  if (!recipe.diloco) return;
  const auto most = static_cast<int64_t>(parameters.size());
  if (recipe.diloco->fragments > most)
    settings.refuse_entry(
        "diloco", "its fragments are more than the parameters that are trained; give 1 to " + std::to_string(most));
  for (const at::Tensor& parameter : parameters)
    if (parameter.scalar_type() == at::kDouble)
      settings.refuse_entry("diloco",
                            "the module has parameters of float64, which machines do not synchronise; give "
                            "the configuration's dtype as float32, or save such a module");
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
