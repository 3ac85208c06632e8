// What a Model writes and reads.

#include <utility>

#include <lockstep/checkpoint.h>

#include "base/error.h"
#include "train_c/guarded.h"
#include "train_c/model.h"
#include "train_c/script.h"

namespace lockstep::train_c {
namespace {

/// A model that has not been trained, as it was before a checkpoint was read that turns out not to fit.
class StateBefore {
 public:
  StateBefore(torch::jit::Module& module, torch::optim::Optimizer& optimizer) : module_(module), optimizer_(optimizer) {
    for (const auto& item : state_of_script(module)) state_.insert(item.key(), item.value().detach().clone());
    for (const auto& group : optimizer.param_groups()) options_.push_back(group.options().clone());
  }
  void restore() const {
    copy_state("the state before", state_, module_);
    optimizer_.state().clear();
    for (size_t i = 0; i < options_.size(); ++i) optimizer_.param_groups()[i].set_options(options_[i]->clone());
  }

 private:
  torch::jit::Module& module_;
  torch::optim::Optimizer& optimizer_;
  StateDict state_;
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options_;
};

}  // namespace

void Model::agree_on(const char* function, const std::string& settings, const std::function<void()>& body) {
  agree(world->all, {.call = call(function), .settings = settings}, [&](Report&) { body(); });
}

void Model::on_rank_zero(const char* function, const std::function<void()>& body) {
  agree(world->all, {.call = call(function), .for_all = true}, [&](Report&) {
    if (world->context.is_main()) body();
  });
}

void Model::save(const std::string& path) {
  // Nothing is written if a rank does something else.
  synchronise("lockstep_train_save", path + "\n");
  on_rank_zero("lockstep_train_save", [&] { save_script(parts_->module, path); });
}

void Model::load(const std::string& path) {
  synchronise("lockstep_train_load", path + "\n");  // a DiLoCo that ends in the middle of a round warns
  on_rank_zero("lockstep_train_load", [&] {
    copy_state("lockstep_train_load of " + path.substr(0, 200), state_of_script(load_script(path)), parts_->module);
  });
  replica_->broadcast_parameters();
  // From the first machine's weights. A machine of --islands that has left the rounds has them from its own file.
  if (diloco_ && !(finished_ && island().count > 1)) begin_rounds();
}

void Model::check_folder(const std::string& folder) const {
  if (folder.empty()) refuse("lockstep_train_save_checkpoint", "folder is empty");
  if (checkpointer_ && folder != folder_)
    refuse("lockstep_train_save_checkpoint", "the checkpoints of this model are in " + folder_ + ", not in " +
                                                 folder.substr(0, 200) + "; a model has only one folder");
}

void Model::open_folder(const std::string& folder) {
  if (checkpointer_) return;
  auto opened = std::make_unique<Checkpointer>(folder, world->context.group(), parts_->recipe.checkpoints);
  using enum Checkpointer::Scope;
  const auto scope = diloco_ ? kEachRank : kAllRanks;  // between rounds machines have different weights
  opened->add("model",
              Checkpointer::Part{.save = [this] { return to_object(state_of_script(parts_->module)); },
                                 .load =
                                     [this](const c10::IValue& state) {
                                       copy_state("the checkpoint", to_state_dict(state), parts_->module);
                                     }},
              scope);
  opened->add("optimizer", *parts_->optimizer, scope);
  if (diloco_) opened->add("diloco", *diloco_);
  if (parts_->scheduler) opened->add("lr_scheduler", *parts_->scheduler, scope);
  opened->check_before_saves([this] { replica_->check_divergence(); });
  checkpointer_ = std::move(opened);
  folder_ = folder;
}

void Model::save_checkpoint(const std::string& folder) {
  agree_on("lockstep_train_save_checkpoint", folder + "\n", [&] {
    check_folder(folder);
    if (!replica_->step_complete())
      refuse("lockstep_train_save_checkpoint",
             "gradients are being accumulated; save after the call that completes the optimizer's step");
  });
  open_folder(folder);
  checkpointer_->save(steps_);
  checkpointer_->finish();
}

int64_t Model::resume(const std::string& folder) {
  agree_on("lockstep_train_resume", folder + "\n", [&] {
    check_folder(folder);
    if (steps_ > 0 || !replica_->step_complete())
      refuse("lockstep_train_resume", "this model has already been trained; resume before its first step");
  });
  const bool was_open = checkpointer_ != nullptr;
  const StateBefore before(parts_->module, *parts_->optimizer);
  open_folder(folder);
  const auto undo = [&] {
    before.restore();
    if (!was_open) checkpointer_ = nullptr;
  };
  try {
    if (!checkpointer_->resume()) return 0;
  } catch (const RefusedInput&) {  // on all ranks
    undo();
    if (diloco_) begin_rounds();
    throw;
  } catch (...) {
    undo();
    throw;
  }
  steps_ = checkpointer_->resumed_step();
  return steps_;
}

}  // namespace lockstep::train_c
