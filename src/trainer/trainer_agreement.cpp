#include "trainer/trainer_agreement.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <typeinfo>
#include <unordered_set>

#include <ATen/core/Dict.h>
#include <c10/util/Type.h>

#include <lockstep/error.h>
#include <lockstep/island.h>

#include "base/rank_names.h"
#include "base/text.h"
#include "checkpoint/checkpoint_message.h"
#include "checkpoint/optimizer_kind.h"
#include "data_parallel/replica_state.h"
#include "rank_page/operation_label.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

/// Lines of "name: value", with every digit of a number.
class OptionLines {
 public:
  OptionLines() { text_.precision(17); }

  template <typename T>
  void add(const std::string& name, const T& value) {
    text_ << name << ": " << value << '\n';
  }
  template <typename T>
  void add(const std::string& name, const std::optional<T>& value) {
    value ? add(name, *value) : add(name, "none");
  }
  void add(const std::string& name, bool value) { add(name, value ? "true" : "false"); }
  void add(const std::string& name, const char* value) { text_ << name << ": " << value << '\n'; }
  std::string text() const { return text_.str(); }

 private:
  std::ostringstream text_;
};

void add_ema(OptionLines& lines, const std::optional<EmaOptions>& ema) {
  lines.add("ema", ema.has_value());
  if (!ema) return;
  lines.add("ema.decays", at::ArrayRef<double>(ema->decays));
  lines.add("ema.warm_up", ema->warm_up);
  lines.add("ema.warmup_gamma", ema->warmup_gamma);
  lines.add("ema.warmup_power", ema->warmup_power);
  lines.add("ema.min_decay", ema->min_decay);
  lines.add("ema.update_after_step", ema->update_after_step);
  lines.add("ema.average_buffers", ema->average_buffers);
}

void add_checkpoints(OptionLines& lines, const TrainerOptions& options) {
  lines.add("folder", options.folder.empty() ? "none" : "given");
  lines.add("checkpoints.every_steps", options.checkpoints.every_steps);
  lines.add("checkpoints.every_minutes", options.checkpoints.every_minutes);
  lines.add("checkpoints.higher_is_better", options.checkpoints.higher_is_better);
  lines.add("checkpoints.memory_every_n_steps", options.checkpoints.memory_every_n_steps);
  lines.add("checkpoints.disk_if_no_memory", options.checkpoints.disk_if_no_memory);
  lines.add("checkpoints.replace_old_run", options.checkpoints.replace_old_run);
}

/// A function cannot be compared; its values at steps throughout the training can.
void add_schedule(OptionLines& lines, const std::optional<Schedule>& schedule, int64_t steps) {
  constexpr int64_t kLooks = 16;
  lines.add("schedule", schedule.has_value());
  if (!schedule || steps < 1) return;
  TORCH_CHECK(schedule->rate, "the schedule has no rate function");
  lines.add("steps of the schedule", steps);
  for (int64_t look = 0; look < std::min(kLooks, steps); ++look) {
    const int64_t step = steps <= kLooks ? look : look * (steps - 1) / (kLooks - 1);
    const std::string at = "schedule at step " + std::to_string(step);
    lines.add(at + ", for a rate of 1", schedule->rate(1, step));
    if (schedule->momentum) lines.add(at + ", momentum", schedule->momentum(step));
  }
}

void add_optimizer(OptionLines& lines, const torch::optim::Optimizer& optimizer, const torch::nn::Module& module) {
  lines.add("optimizer", c10::demangle(typeid(optimizer).name()));
  std::vector<OptimizerOption> known;
  try {
    known = kind_of(optimizer).options;
  } catch (const c10::Error&) {  // a user's own options, only one of which can be read
    known = {{"lr", [](const auto& options) { return c10::IValue(options.get_lr()); }, nullptr}};
  }
  std::map<const c10::TensorImpl*, std::string> names;
  for (const auto& item : module.named_parameters()) names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  const auto& groups = optimizer.param_groups();
  lines.add("parameter groups", groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    const std::string name = "optimizer's group " + std::to_string(i) + ", ";
    lines.add(name + "parameters", groups[i].params().size());
    for (const OptimizerOption& option : known) try {
        lines.add(name + option.name, option.get(groups[i].options()));
      } catch (const c10::Error&) {  // options without a learning rate
      }
    for (size_t place = 0; place < groups[i].params().size(); ++place) {
      const at::Tensor& parameter = groups[i].params()[place];
      const auto found = names.find(parameter.unsafeGetTensorImpl());
      const std::string line = name + "parameter " + std::to_string(place);
      if (found != names.end())
        lines.add(line, found->second);
      else
        lines.add(line + ", none of the module", parameter.defined() ? c10::str(parameter.sizes()) : "undefined");
    }
  }
}

std::string first_problem(const std::vector<std::string>& ranks) {
  const auto first = std::find_if(ranks.begin(), ranks.end(), [](const auto& rank) { return !rank.empty(); });
  return first == ranks.end() ? "" : *first + " (on " + ranks_with(ranks, *first) + ")";
}

/// Throws on all ranks if there is a problem on one.
/// REQUIRES: all ranks call it.
void throw_first(const Group& group, const std::string& from, const std::string& mine) {
  const std::string first = first_problem(group.all_gather_bytes(mine));
  if (!first.empty()) throw Error(from + first);
}

/// Throws unless gradients are reduced over all ranks.
void check_attachment(const Group& group, const torch::nn::Module& module, const torch::optim::Optimizer& optimizer,
                      const Replica& model, const TrainerOptions& options) {
  const ReplicaState& state = state_of(model);
  // The ranks of one machine, where each machine trains by itself, are DiLoCo's to check.
  if (!options.diloco && state.group.world_size() != group.world_size())
    throw Error("Trainer: the model is replicated over " + counted(state.group.world_size(), "rank", "ranks") +
                ", but the context has " + std::to_string(group.world_size()) +
                ", so its parts would train separately; make the model over the context, or set "
                "TrainerOptions::diloco, with which machines train separately and synchronise every few steps");
  std::unordered_set<const c10::TensorImpl*> of_model, held;
  for (const auto& [name, tensor] : state.attached.source().parameters()) of_model.insert(tensor.unsafeGetTensorImpl());
  for (const auto& one : optimizer.param_groups())
    for (const at::Tensor& parameter : one.params()) held.insert(parameter.unsafeGetTensorImpl());
  for (const auto& item : module.named_parameters()) {
    const c10::TensorImpl* const parameter = item.value().unsafeGetTensorImpl();
    if (item.value().requires_grad() && held.contains(parameter) && !of_model.contains(parameter))
      throw Error("Trainer: the optimizer trains the parameter " + item.key() +
                  " of the module, but the given model is attached to another module that lacks it, so its gradients "
                  "would not be reduced; attach the model to the module that the Trainer trains");
  }
}

}  // namespace

void check_same_machines(const Group& group, const TrainerOptions& options) {
  const OperationLabel label("Trainer()");
  const auto given = group.all_gather_bytes(options.diloco ? "given" : "");
  if (std::adjacent_find(given.begin(), given.end(), std::not_equal_to<>()) == given.end()) return;
  throw Error("Trainer: TrainerOptions::diloco is given on " + ranks_with(given, std::string("given")) +
              ", and not on " + ranks_with(given, std::string()) +
              ". Every rank must give the same options: take them from the command line, or from rank 0 "
              "(from_rank_zero)");
}

void check_attached(const Group& group, const torch::nn::Module& module, const torch::optim::Optimizer& optimizer,
                    const Replica& model, const TrainerOptions& options) {
  check_same_machines(group, options);
  const OperationLabel label("Trainer()");
  throw_first(group, "", failure_of([&] { check_attachment(group, module, optimizer, model, options); }));
}

TrainerOptions on_island(TrainerOptions options) {
  const Island machine = island();
  if (machine.count == 1) return options;
  const std::string own = "/machine_" + std::to_string(machine.number);
  if (!options.folder.empty()) options.folder += own;
  if (options.run_log && !options.run_log->folder.empty()) options.run_log->folder += own;
  return options;
}

void check_agreement(const Group& group, const Agreement& agreement,
                     const std::function<void(const Schedule&)>& use_schedule) {
  const OperationLabel label("Trainer::fit()");
  const TrainerOptions& options = agreement.options;
  if (island().count > 1 && !options.diloco)
    throw Error(
        "Trainer::fit(): nothing keeps the machines of `lockstep run --islands` together; set TrainerOptions::diloco, "
        "or start the program without --islands");
  OptionLines lines;
  lines.add("epochs", options.epochs);
  lines.add("accumulate", options.accumulate);
  lines.add("clip_grad_norm", options.clip_grad_norm);
  lines.add("precision", options.precision == Precision::kFloat      ? "kFloat"
                         : options.precision == Precision::kBFloat16 ? "kBFloat16"
                                                                     : "kHalf");
  add_ema(lines, options.ema);
  lines.add("diloco", options.diloco.has_value());
  lines.add("score", options.score);
  lines.add("patience", options.patience);
  add_checkpoints(lines, options);
  lines.add("run_log", options.run_log.has_value());
  lines.add("evaluate_on() called", agreement.evaluates);
  std::optional<Schedule> schedule;
  const std::string problem = failure_of([&] {
    if (options.schedule) schedule = options.schedule(agreement.steps);
    add_schedule(lines, schedule, agreement.steps);
  });
  add_optimizer(lines, agreement.optimizer, agreement.module);
  const auto check_problems = [&](const std::string& mine) { throw_first(group, "Trainer::fit(): ", mine); };
  check_problems(problem);
  const std::string difference = first_difference("option", group.all_gather_bytes(lines.text()));
  if (!difference.empty()) {
    own_page().fail(RankFailure::kMismatch, -1, "Trainer::fit(): options differ: " + difference);
    throw Error(
        "Trainer::fit(): ranks have different options: " + difference +
        ". Every rank must give the same options: take them from the command line, or from rank 0 (from_rank_zero)");
  }
  if (schedule) check_problems(failure_of([&] { use_schedule(*schedule); }));
}

namespace {

c10::IValue state_of_accumulation(int accumulate, int ranks) {
  c10::impl::GenericDict state(c10::AnyType::get(), c10::AnyType::get());
  state.insert(std::string("batches"), static_cast<int64_t>(accumulate));
  state.insert(std::string("ranks"), static_cast<int64_t>(ranks));
  return state;
}

/// Throws Error if the same number of ranks took another number of batches.
void check_accumulation(const c10::IValue& saved, int accumulate, int ranks) {
  const auto number = [&](const char* name) {
    if (!saved.isGenericDict()) throw Error("is not a dictionary");
    const auto state = saved.toGenericDict();
    const auto found = state.find(std::string(name));
    if (found == state.end() || !found->value().isInt()) throw Error("has no number `" + std::string(name) + "`");
    return found->value().toInt();
  };
  // A different number of ranks may well accumulate another number of batches, so that a step has as many samples.
  if (number("ranks") != ranks || number("batches") == accumulate) return;
  throw Error("it was saved by a run with TrainerOptions::accumulate = " + std::to_string(number("batches")) +
              ", but this one has " + std::to_string(accumulate) +
              ", so its steps would not continue those; set it as in that run, or train in another folder");
}

}  // namespace

Checkpointer::Part accumulation_part(int accumulate, const Context& context) {
  const int ranks = context.virtual_ranks() > 0 ? context.virtual_ranks() : context.world_size();
  return {.save = [=] { return state_of_accumulation(accumulate, ranks); },
          .load = [=](const c10::IValue& saved) { check_accumulation(saved, accumulate, ranks); }};
}

void check_loss(const at::Tensor& loss) {
  TORCH_CHECK(loss.defined(), "Trainer::fit(): the loss is an undefined tensor; return the mean over the batch");
  TORCH_CHECK(loss.numel() == 1, "Trainer::fit(): the loss has the shape ", loss.sizes(),
              "; return one number, the mean over the batch");
  TORCH_CHECK(loss.requires_grad(),
              "Trainer::fit(): the loss depends on no parameter, so there is nothing to train; check whether it was "
              "detached, or computed under NoGradGuard");
}

}  // namespace lockstep
