#include "train_c/model.h"

#include <string_view>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "train_c/guarded.h"
#include "train_c/script.h"

namespace lockstep::train_c {
namespace {

/// Evaluation mode, until the end of the scope.
class Evaluation {
 public:
  explicit Evaluation(torch::jit::Module& module) : module_(module) { module_.eval(); }
  ~Evaluation() { module_.train(); }
  Evaluation(const Evaluation&) = delete;

 private:
  torch::jit::Module& module_;
  const at::NoGradGuard no_grad_;
};

std::vector<c10::IValue> arguments(const Arrays& inputs) {
  std::vector<c10::IValue> values;
  for (at::Tensor& tensor : inputs.copies()) values.emplace_back(std::move(tensor));
  return values;
}

std::vector<at::Tensor> trained(const torch::jit::Module& module) {
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& parameter : module.parameters())
    if (parameter.requires_grad()) parameters.push_back(parameter);
  return parameters;
}

/// The ranks of this rank's machine. Every rank of the world calls it.
Party ranks_of_machine(const World& world) {
  Party party{world.context.group().on_this_machine()};
  if (party.group.world_size() == world.context.world_size()) return world.all;  // calls that differ are told then
  for (const std::string& number : party.group.all_gather_bytes(std::to_string(world.context.rank())))
    party.numbers.push_back(std::stoi(number));
  return party;
}

DistributedDataParallelOptions replica_options(const Recipe& recipe) {
  DistributedDataParallelOptions options;
  if (recipe.is_sum) options.reduction = GradientReduction::kSum;
  if (recipe.weight_by_rows) options.reduction = GradientReduction::kWeightedMean;
  return options;
}

}  // namespace

Parts::Parts(World& world, const std::string& file, const std::string& configuration) {
  Settings given = Settings::read(configuration);
  recipe = recipe_of(given);
  module = load_script(file);
  if (recipe.dtype) module.to(*recipe.dtype);
  module.train();
  std::vector<at::Tensor> parameters = trained(module);
  if (parameters.empty()) refuse("lockstep_train_create", file + " has no parameters to train");
  check_diloco(given, recipe, parameters);
  optimizer = optimizer_of(given, std::move(parameters));
  if (recipe.schedule) scheduler = std::make_unique<LRScheduler>(*optimizer, *recipe.schedule);
  if (!recipe.log.empty()) log = SummaryWriter(world.context, recipe.log);
  settings = given.lines() + "the module's code with hash " + code_hash(module) + "\n";
}

Model::Model(std::shared_ptr<World> of, const std::string& file, const std::string& configuration)
    : world(std::move(of)) {
  agree(world->all, {.call = "lockstep_train_create"}, [&](Report& report) {
    parts_ = std::make_unique<Parts>(*world, file, configuration);
    report.settings = parts_->settings;
  });
  number_ = ++world->made;
  replicas_.emplace(parts_->recipe.diloco ? ranks_of_machine(*world) : world->all);
  replica_ = std::make_unique<Replica>(parts_->module, replicas_->group, replica_options(parts_->recipe));
  if (parts_->recipe.diloco) begin_rounds();
  if (parts_->recipe.accumulate > 1) accumulation_.emplace(replica_->accumulate(parts_->recipe.accumulate));
  if (parts_->recipe.check_equal_every > 0) replica_->check_divergence_every(parts_->recipe.check_equal_every);
}

const Party& Model::party(const char* function) const {
  return function == std::string_view("lockstep_train_step") ? *replicas_ : world->all;
}

void Model::begin_rounds() {
  // A C program cannot call it, and must not be told to.
  (void)island_shard({0, 1});
  diloco_.emplace(*replica_, world->context.group(), *parts_->recipe.diloco);
}

void Model::synchronise(const char* function, std::string settings, bool last) {
  if (diloco_) settings += "steps " + std::to_string(steps_) + "\n";
  agree_on(function, settings, [] {});
  if (!diloco_ || finished_) return;
  if (last)
    diloco_->finish();
  else
    diloco_->synchronise();
  finished_ = last;
}

void Model::finish() { synchronise("lockstep_train_finish", "", /*last=*/true); }

double Model::learning_rate() const { return parts_->optimizer->param_groups().at(0).options().get_lr(); }

at::Tensor Model::loss_of(const std::string& function, const Arrays& inputs, const Arrays& targets) {
  const Recipe& recipe = parts_->recipe;
  std::vector<c10::IValue> values = arguments(inputs);
  if (recipe.loss_is_module)
    for (c10::IValue& target : arguments(targets)) values.push_back(std::move(target));
  const std::vector<at::Tensor> outputs = tensors_of(function, parts_->module.forward(std::move(values)));
  at::Tensor loss;
  if (!recipe.loss_is_module)
    loss = recipe.loss(outputs, targets.copies());
  else if (outputs.size() == 1)
    loss = outputs[0];
  else
    refuse(function,
           "the module must return its loss alone, but returns " + std::to_string(outputs.size()) + " tensors");
  if (!loss.defined() || loss.numel() != 1 || !loss.is_floating_point())
    refuse(function, "the loss must be one number, but is " + (loss.defined() ? text_of(loss) : "undefined"));
  return loss;
}

double Model::rows_of(const std::string& function, const Arrays& inputs, bool trains) {
  const int64_t rows = inputs.rows();
  if (trains && replica_->step_complete()) rows_ = rows;
  // A rank has one weight in a reduction.
  if (trains && rows != rows_)
    refuse(function, "inputs[0] has " + std::to_string(rows) + " rows, but had " + std::to_string(rows_) +
                         " in the previous call; with weight_by_rows all calls that accumulate for one step of the "
                         "optimizer must have the same number of rows on a rank");
  return static_cast<double>(rows);
}

std::vector<Report> Model::agree_on_loss(const char* function, const Arrays& inputs, const Arrays& targets, bool trains,
                                         at::Tensor& loss) {
  const Recipe& recipe = parts_->recipe;
  const bool any_rows = recipe.weight_by_rows || recipe.is_sum;
  return agree(party(function), {.call = call(function)}, [&](Report& report) {
    if (trains && finished_)
      refuse(report.call, "lockstep_train_finish() has ended the training; make another model to train on");
    report.settings = inputs.text(any_rows) + targets.text(any_rows);
    if (inputs.rows() == 0 && !recipe.is_sum) refuse(report.call, "inputs[0] has no rows, so the loss has no mean");
    if (trains && parts_->scheduler) parts_->scheduler->next_lr();  // a schedule that has ended is told before the step
    if (recipe.weight_by_rows) report.weight = rows_of(report.call, inputs, trains);
    loss = loss_of(report.call, inputs, targets);
    if (trains && !loss.requires_grad()) refuse(report.call, "the loss does not depend on any parameter of the module");
    report.loss = loss.item<double>();
  });
}

double Model::total(const std::vector<Report>& reports) const {
  double sum = 0, weights = 0;
  for (const Report& report : reports) {
    sum += report.weight * report.loss;
    weights += report.weight;
  }
  return parts_->recipe.is_sum ? sum : sum / weights;
}

double Model::step(const Arrays& inputs, const Arrays& targets) {
  const at::AutoGradMode with_gradients(true);
  at::Tensor loss;
  const std::vector<Report> reports = agree_on_loss("lockstep_train_step", inputs, targets, /*trains=*/true, loss);
  const Recipe& recipe = parts_->recipe;
  const double result = total(reports);
  if (recipe.weight_by_rows) replica_->set_weight(reports[static_cast<size_t>(replicas_->group.rank())].weight);
  if (recipe.accumulate > 1 && !recipe.is_sum) loss = loss / recipe.accumulate;
  try {
    loss.backward();
  } catch (...) {
    parts_->optimizer->zero_grad();  // what the backward left belongs to no step
    throw;
  }
  if (replica_->step_complete()) finish_step(result);
  return result;
}

void Model::finish_step(double loss) {
  if (parts_->recipe.max_grad_norm) replica_->clip_grad_norm(*parts_->recipe.max_grad_norm);
  const double rate = learning_rate();
  parts_->optimizer->step();
  parts_->optimizer->zero_grad();
  if (diloco_) diloco_->step();
  if (parts_->scheduler) parts_->scheduler->step();
  ++steps_;
  parts_->log.add_scalar("loss", loss, steps_);
  parts_->log.add_scalar("lr", rate, steps_);
  if (checkpointer_) checkpointer_->step(steps_);
}

double Model::evaluate(const Arrays& inputs, const Arrays& targets) {
  if (diloco_) synchronise("lockstep_train_evaluate", "");
  const Evaluation evaluation(parts_->module);
  at::Tensor loss;
  return total(agree_on_loss("lockstep_train_evaluate", inputs, targets, /*trains=*/false, loss));
}

void Model::infer(const Arrays& inputs, const Arrays& outputs) {
  const Evaluation evaluation(parts_->module);
  c10::IValue result;
  try {
    result = parts_->module.forward(arguments(inputs));
  } catch (...) {
    const Failure failure = current_failure(LOCKSTEP_INVALID_ARGUMENT);
    throw StatusError(failure.status, "lockstep_train_infer: " + failure.text);
  }
  outputs.write("lockstep_train_infer", tensors_of("lockstep_train_infer", result));
}

Handles<Model, lockstep_train_model>& models() {
  static auto* const all = new Handles<Model, lockstep_train_model>("model");
  return *all;
}

}  // namespace lockstep::train_c
