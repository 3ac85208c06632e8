#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/jit/api/module.h>
#include <torch/optim/optimizer.h>

#include <lockstep/checkpointer.h>
#include <lockstep/diloco.h>
#include <lockstep/island.h>
#include <lockstep/lr_scheduler.h>
#include <lockstep/replica.h>
#include <lockstep/summary_writer.h>

#include "train_c/arrays.h"
#include "train_c/recipe.h"
#include "train_c/world.h"

namespace lockstep::train_c {

/// What this rank alone needs of a model: all that may fail before ranks work together.
struct Parts {
  Parts(World& world, const std::string& file, const std::string& configuration);

  torch::jit::Module module;
  Recipe recipe;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::unique_ptr<LRScheduler> scheduler;  ///< null: the rate is constant
  SummaryWriter log;
  std::string settings;  ///< lines that must be equal on all ranks
};

/// A module with its optimizer, behind a lockstep_train_model. Every rank makes one, and calls the same functions, but
/// for those that are local.
class Model {
 public:
  Model(std::shared_ptr<World> world, const std::string& file, const std::string& configuration);

  /// Returns the loss over all ranks; where each machine trains by itself, over its ranks.
  double step(const Arrays& inputs, const Arrays& targets);
  /// Returns the loss over all ranks.
  double evaluate(const Arrays& inputs, const Arrays& targets);
  /// Ends the rounds between machines. Steps are refused then.
  void finish();
  /// Local.
  void infer(const Arrays& inputs, const Arrays& outputs);

  int64_t steps() const { return steps_; }
  double learning_rate() const;
  void log(const std::string& name, double value) { parts_->log.add_scalar(name, value, steps_); }

  void save(const std::string& path);
  void load(const std::string& path);
  void save_checkpoint(const std::string& folder);
  int64_t resume(const std::string& folder);

  /// The call as the other ranks know it.
  std::string call(const char* function) const {
    return std::string(function) + " of model " + std::to_string(number_);
  }

  /// The ranks that call the function together: a machine's own for a step, where each machine trains by itself.
  const Party& party(const char* function) const;

  const std::shared_ptr<World> world;

 private:
  /// Agrees on the function with the other ranks, and on the steps where each machine trains by itself. All of these
  /// get the same weights then. `last`: steps are refused afterwards.
  void synchronise(const char* function, std::string settings, bool last = false);
  /// Makes the DiLoCo anew: all ranks get rank 0's weights.
  void begin_rounds();
  at::Tensor loss_of(const std::string& call, const Arrays& inputs, const Arrays& targets);
  /// The weight of this rank's batch.
  double rows_of(const std::string& call, const Arrays& inputs, bool trains);
  std::vector<Report> agree_on_loss(const char* function, const Arrays& inputs, const Arrays& targets, bool trains,
                                    at::Tensor& loss);
  double total(const std::vector<Report>& reports) const;
  void finish_step(double loss);
  void open_folder(const std::string& folder);
  void check_folder(const std::string& folder) const;
  void agree_on(const char* function, const std::string& settings, const std::function<void()>& body);
  void on_rank_zero(const char* function, const std::function<void()>& body);

  int number_ = 0;  ///< in the order of making
  std::unique_ptr<Parts> parts_;
  std::optional<Party> replicas_;  ///< all ranks, or those of a machine that trains by itself
  std::unique_ptr<Replica> replica_;
  std::optional<DiLoCo> diloco_;
  bool finished_ = false;
  std::optional<Accumulation> accumulation_;
  std::string folder_;                          ///< of the checkpointer
  std::unique_ptr<Checkpointer> checkpointer_;  ///< null until a folder is given
  int64_t steps_ = 0;
  int64_t rows_ = 0;  ///< of a call, with weight_by_rows; the same until the optimizer steps
};

Handles<Model, lockstep_train_model>& models();

}  // namespace lockstep::train_c
