#include <lockstep/checkpointer.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/machine_name.h"
#include "base/rank_names.h"
#include "base/text.h"
#include "base/weights_set.h"
#include "checkpoint/accumulation.h"
#include "checkpoint/checkpoint_part.h"
#include "checkpoint/checkpoint_resume.h"
#include "checkpoint/checkpoint_saver.h"
#include "checkpoint/forgotten_parts.h"
#include "checkpoint/memory_tier.h"
#include "checkpoint/optimizer_state.h"
#include "checkpoint/random_states.h"
#include "checkpoint/save_schedule.h"
#include "checkpoint/slice_holders.h"
#include "collectives/group_state.h"
#include "collectives/sharded_parameters.h"
#include "rank_page/operation_label.h"
#include "rank_page/rank_board.h"

namespace lockstep {

struct Checkpointer::State {
  State(const std::string& folder, Group group_, const CheckpointerOptions& options)
      : group(std::move(group_)),
        path(folder),
        replace_old_run(options.replace_old_run),
        saver(folder, group, options),
        schedule(group, options),
        memory(MemoryTier::make(folder, group, options)) {}

  void save(int64_t step, std::optional<double> score);
  bool step(int64_t step);
  bool resume();
  void compare_parts();
  void begin_run();
  void check_step(int64_t step) const;
  /// Of a checkpointer that does not resume, such as one for the best models, nothing need be known.
  void warn_if_forgotten() const {
    if (is_asked_to_resume && group.rank() == 0) warn_of_forgotten_parts(parts);
  }

  const Group group;
  const std::string path;
  const bool replace_old_run;
  std::vector<CheckpointPart> parts;
  std::vector<std::function<void()>> checks;  ///< called before each save
  CheckpointSaver saver;
  SaveSchedule schedule;
  const std::unique_ptr<MemoryTier> memory;  ///< null: disk only
  int64_t resumed_step = 0;
  AccumulationCheck accumulation;
  int64_t newest = -1;  ///< step that this run has saved or resumed; -1: none
  bool parts_compared = false, is_asked_to_resume = false;
};

namespace {

/// Ranks of one machine with different folders would save one rank's state where the others do not look for it.
/// Machines may have mounted a shared folder at different places.
void compare_folders(const Group& group, const std::string& folder) {
  std::error_code unknown;
  auto absolute = std::filesystem::weakly_canonical(std::filesystem::absolute(folder, unknown), unknown);
  if (!absolute.has_filename()) absolute = absolute.parent_path();  // it ended with a slash
  const std::string machine = machine_name();
  const auto said = group.all_gather_bytes(machine + '\n' + (unknown ? folder : absolute.string()));
  for (size_t a = 0; a < said.size(); ++a)
    for (size_t b = a + 1; b < said.size(); ++b) {
      const size_t end = said[a].find('\n') + 1;
      if (said[a] == said[b] || said[b].substr(0, end) != said[a].substr(0, end)) continue;
      throw Error("ranks have given their Checkpointer different folders: rank " + std::to_string(a) + " " +
                  said[a].substr(end) + " and rank " + std::to_string(b) + " " + said[b].substr(end) +
                  ". Ranks save and resume together, so all of them must give the same folder");
    }
}

/// REQUIRES: all ranks call it.
void compare_options(const Group& group, const std::string& folder, const CheckpointerOptions& options) {
  if (group.world_size() == 1) return;
  const OperationLabel label("Checkpointer()");
  const auto text = [](const auto& value) { return value ? std::to_string(*value) : "none"; };
  const std::string lines =
      "every_steps: " + text(options.every_steps) + "\nevery_minutes: " + text(options.every_minutes) +
      "\nmemory_every_n_steps: " + text(options.memory_every_n_steps) +
      "\nkeep_last: " + std::to_string(options.keep_last) + "\nkeep_best: " + std::to_string(options.keep_best) +
      "\nhigher_is_better: " + std::to_string(options.higher_is_better) +
      "\nasynchronous: " + std::to_string(options.asynchronous) +
      "\ndisk_if_no_memory: " + std::to_string(options.disk_if_no_memory) +
      "\nreplace_old_run: " + std::to_string(options.replace_old_run);
  const std::string difference = first_difference("option", group.all_gather_bytes(lines));
  if (difference.empty()) return compare_folders(group, folder);
  throw Error("ranks have different CheckpointerOptions: " + difference +
              ". Ranks save together, so every rank must give the same ones");
}

/// Others cannot set a sharded model's parameters: its parts lie elsewhere.
void check_not_sharded(const torch::nn::Module& module, const std::string& name) {
  for (const at::Tensor& parameter : module.parameters())
    TORCH_CHECK(!is_sharded(parameter), "Checkpointer: the module of part `", name,
                "` is trained by a FullyShardedDataParallel, which alone can save and set its parameters; add that "
                "instead: checkpointer.add(\"",
                name, "\", model)");
}

const char* scope_name(Checkpointer::Scope scope) {
  using enum Checkpointer::Scope;
  return scope == kAllRanks ? "kAllRanks" : scope == kEachRank ? "kEachRank" : "kRankZero";
}

/// Names a model that is not replicated over all of the group's ranks, so that rank 0's may not be theirs. Empty if
/// none.
std::string partly_replicated(const std::vector<CheckpointPart>& parts, const Group& group) {
  std::vector<int> saving;
  for (int rank = 0; rank < group.world_size(); ++rank) saving.push_back(state_of(group).number_of_all(rank));
  std::sort(saving.begin(), saving.end());
  for (const CheckpointPart& part : parts) {
    std::vector<int> replicas = part.replica_ranks;
    std::sort(replicas.begin(), replicas.end());
    if (!replicas.empty() && !std::includes(replicas.begin(), replicas.end(), saving.begin(), saving.end()))
      return '`' + part.name + "` is replicated over " + rank_names(replicas) + ", and the checkpointer saves for " +
             rank_names(saving);
  }
  return "";
}

}  // namespace

/// Called once, before the parts are first used: in another order, equal parts would look different.
/// REQUIRES: all ranks call it.
void Checkpointer::State::compare_parts() {
  if (std::exchange(parts_compared, true) || group.world_size() == 1) return;
  std::string lines;
  for (const CheckpointPart& part : parts) lines += part.name + ", " + scope_name(part.scope) + '\n';
  const std::string difference = first_difference("part", group.all_gather_bytes(lines));
  const auto problems = group.all_gather_bytes(difference.empty() ? partly_replicated(parts, group) : "");
  const auto problem = std::find_if(problems.begin(), problems.end(), [](const auto& one) { return !one.empty(); });
  if (difference.empty() && problem == problems.end()) return;
  parts_compared = false;
  if (difference.empty())
    throw Error("Checkpointer: the model " + *problem +
                ", so other ranks may hold other weights; add the module itself and its optimizer with "
                "Scope::kEachRank");
  throw Error("ranks have added different parts to the Checkpointer: " + difference +
              ". Every rank must add the same parts, in the same order and with the same scope");
}

/// Called before the first step is counted.
/// REQUIRES: all ranks call it.
void Checkpointer::State::begin_run() {
  if (replace_old_run && newest < 0 && saver.step_found() >= 0) saver.clear_folder();
}

/// Throws Error for a step that this run cannot have.
void Checkpointer::State::check_step(int64_t step) const {
  constexpr int64_t kMost = 999'999'999'999;  // a file's name has this many digits
  if (step < 0 || step > kMost)
    throw Error("the step is " + std::to_string(step) + "; steps count from 0 to " + std::to_string(kMost));
  if (step < newest)
    throw Error(
        "this run has already saved step " + std::to_string(newest) +
        ", and a restart would resume that one; steps must increase, so call resume() to return to a checkpoint");
  if (newest < 0 && step <= saver.step_found())
    throw Error("the folder " + path + " holds step " + std::to_string(saver.step_found()) +
                " of another run, which would be resumed instead. Call resume() before the first step to go on with "
                "that run, give this one a folder of its own, or remove the old one's checkpoints with "
                "CheckpointerOptions::replace_old_run");
}

void Checkpointer::State::save(int64_t step, std::optional<double> score) {
  using Outcome = CheckpointMessage::Outcome;
  compare_parts();
  begin_run();
  accumulation.look_before_save(step, parts, group);
  for (const auto& check : checks) check();
  const CheckpointMessage result = saver.save(parts, step, score, failure_of([&] { check_step(step); }));
  if (result.outcome == Outcome::kDone) {
    schedule.start_after(step);
    newest = step;
    warn_if_forgotten();
    return;
  }
  const std::string text = "the state of step " + std::to_string(step) + " cannot be saved: " + result.text;
  if (result.outcome == Outcome::kFailed) throw Error(text);
  own_page().fail(RankFailure::kDiverged, -1, text);
  throw Error(text +
              ". The file holds one state for all ranks, so it must be the same on all of them: broadcast what is set "
              "or drawn on each rank. If ranks may differ there, add the part with Scope::kEachRank, which saves every "
              "rank's, or with Scope::kRankZero, which saves rank 0's without comparing");
}

bool Checkpointer::State::step(int64_t step) {
  begin_run();
  const bool to_memory = memory && memory->is_due(step);
  std::string problem;
  if (to_memory || newest < 0 || step < 0) problem = failure_of([&] { check_step(step); });
  if (!to_memory && !problem.empty()) throw Error("Checkpointer::step(" + std::to_string(step) + "): " + problem);
  if (to_memory) {
    compare_parts();
    accumulation.look_before_save(step, parts, group);
    memory->save(parts, step, std::move(problem));
    newest = step;
    warn_if_forgotten();
  }
  if (!schedule.is_due(step)) return false;
  save(step, {});
  return true;
}

bool Checkpointer::State::resume() {
  compare_parts();
  is_asked_to_resume = true;
  saver.wait();  // the newest may still be on its way to the disk
  const auto resumed = resume_parts(parts, saver.folder(), memory.get(), group);
  if (!resumed) return false;
  note_any_weights_set();
  resumed_step = newest = resumed->step;
  accumulation = resumed->accumulation;
  schedule.start_after(resumed->step_on_disk);
  if (memory) memory->start_after(resumed->step);
  if (resumed->path.empty()) own_page().note_memory_checkpoint(resumed->step);
  if (group.rank() == 0 && !resumed->path.empty())
    own_page().note_checkpoint(resumed->path, resumed->step, Clock::now());
  return true;
}

Checkpointer::Checkpointer(const std::string& folder, Group group, CheckpointerOptions options) {
  compare_options(group, folder, options);
  TORCH_CHECK(!options.every_steps || *options.every_steps > 0, "Checkpointer: every_steps is ", *options.every_steps,
              "; it must be at least 1");
  TORCH_CHECK(!options.every_minutes || *options.every_minutes > 0, "Checkpointer: every_minutes is ",
              *options.every_minutes, "; it must be above 0");
  TORCH_CHECK(options.keep_last > 0 && options.keep_best >= 0, "Checkpointer: keep_last is ", options.keep_last,
              " and keep_best ", options.keep_best, "; they must be at least 1 and 0");
  TORCH_CHECK(!options.memory_every_n_steps || *options.memory_every_n_steps > 0,
              "Checkpointer: memory_every_n_steps is ", *options.memory_every_n_steps, "; it must be at least 1");
  state_ = std::make_unique<State>(folder, std::move(group), options);
}

Checkpointer::~Checkpointer() = default;

Checkpointer& Checkpointer::add(const std::string& name, Part part, Scope scope) {
  TORCH_CHECK(name != kStepKey && name != kRanksKey && name != kRandom && name != kRandomCuda &&
                  name != kRandomVirtual && name != kVirtualRanksKey && name != kThreadsKey &&
                  name != kAccumulationKey && !name.empty(),
              "Checkpointer: a part cannot be called `", name, "`, a name that the file reserves; choose another");
  for (const auto& known : state_->parts)
    TORCH_CHECK(known.name != name, "Checkpointer: a part already has the name `", name, "`; choose another name");
  TORCH_CHECK(part.save && part.load, "Checkpointer: part `", name, "` must have both functions, save and load");
  state_->parts.push_back({name, std::move(part), scope});
  return *this;
}

Checkpointer& Checkpointer::add(const std::string& name, torch::nn::Module& module, Scope scope) {
  check_not_sharded(module, name);
  add(name,
      Part{.save =
               [&module, name] {
                 check_not_sharded(module, name);
                 return to_object(state_dict(module));
               },
           .load =
               [&module, name](const c10::IValue& state) {
                 check_not_sharded(module, name);
                 load_state_dict(module, to_state_dict(state));
               }},
      scope);
  state_->parts.back().module = &module;
  return *this;
}

Checkpointer& Checkpointer::add(const std::string& name, torch::optim::Optimizer& optimizer, Scope scope) {
  add(name,
      Part{.save = [&optimizer] { return optimizer_state_dict(optimizer); },
           .load = [&optimizer](const c10::IValue& state) { adopt_optimizer_state_dict(optimizer, state); }},
      scope);
  state_->parts.back().save_in_slices = [&optimizer](const Group& group) {
    return optimizer_state_in_slices(optimizer, group);
  };
  state_->parts.back().is_never_whole = [&optimizer] { return is_never_whole(optimizer); };
  state_->parts.back().elements_to_load = [&optimizer](const c10::IValue& state) {
    return elements_to_load(optimizer, state);
  };
  return *this;
}

Checkpointer& Checkpointer::add(const std::string& name, detail::StateInSlices& model) {
  add(name, Part{.save = [name]() -> c10::IValue {
                   throw Error("Checkpointer: `" + name +
                               "` is sharded over the ranks and cannot be saved as a whole on one of them");
                 },
                 .load = [&model](const c10::IValue& state) { model.load_state_dict(to_state_dict(state)); }});
  state_->parts.back().save_in_slices = [&model](const Group& group) -> std::optional<c10::IValue> {
    if (const Group* holders = model.slice_holders(); holders && holders->world_size() != group.world_size())
      refuse_other_group(*holders, group);
    return to_object(model.state_in_slices());
  };
  state_->parts.back().is_never_whole = [] { return true; };
  state_->parts.back().elements_to_load = [&model](const c10::IValue& state) {
    return model.elements_to_load(to_state_dict(state));
  };
  return *this;
}

Checkpointer& Checkpointer::add_replicas(const std::string& name, torch::nn::Module& module,
                                         const std::vector<std::string>& ignored, std::function<int()> accumulation,
                                         std::vector<int> ranks) {
  add(name, module, Scope::kRankZero);
  state_->parts.back().replicas = &module;
  state_->parts.back().ignored = {ignored.begin(), ignored.end()};
  state_->parts.back().accumulation = std::move(accumulation);
  state_->parts.back().replica_ranks = std::move(ranks);
  return *this;
}

Checkpointer& Checkpointer::check_before_saves(std::function<void()> check) {
  state_->checks.push_back(std::move(check));
  return *this;
}

bool Checkpointer::resume() {
  const OperationLabel label("Checkpointer::resume()");
  return state_->resume();
}

int64_t Checkpointer::resumed_step() const { return state_->resumed_step; }

bool Checkpointer::step(int64_t step) {
  const OperationLabel label("Checkpointer::step()");
  return state_->step(step);
}

void Checkpointer::save(int64_t step, std::optional<double> score) {
  const OperationLabel label("Checkpointer::save()");
  state_->save(step, score);
}

void Checkpointer::finish() {
  const OperationLabel label("Checkpointer::finish()");
  state_->saver.finish();
}

}  // namespace lockstep
