#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <lockstep/fully_sharded_data_parallel.h>

#include "data_parallel/tensor_memory.h"
#include "fully_sharded/contents.h"
#include "fully_sharded/edit_check.h"
#include "fully_sharded/failure_watch.h"
#include "fully_sharded/found_units.h"
#include "fully_sharded/gathering.h"
#include "fully_sharded/gradient_parts.h"
#include "fully_sharded/machine_groups.h"
#include "fully_sharded/part_gradients.h"
#include "fully_sharded/unit.h"
#include "fully_sharded/use_check.h"
#include "reducer/gradient_hook.h"

namespace lockstep {

/// The members of a FullyShardedDataParallel, and its timeline, all on the training thread:
///
///     a unit's forward begins    it is gathered and opened; the next is on its way     Gathering
///     a unit's forward ends      it is closed; its outputs get a hook                  Tensor::register_hook
///     the hook: its backward     the unit whose backward came before is done: its      GradientParts
///     begins                     gradients go to the parts; this one is opened
///     the backward has ended     the last unit's gradients, and those of the rest
///     the optimizer has stepped  what stays gathered is brought up to date             Unit::gather_changes
///
/// Autograd always runs the newest node that is ready, so when a hook of an earlier unit is called, all work of later
/// units, including their gradients, is done.
class FullySharded::State final : public detail::UnitCalls, public std::enable_shared_from_this<State> {
 public:
  State(std::shared_ptr<torch::nn::Module> module, const Group& group, const FullyShardedOptions& options);
  ~State() override;
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  /// Makes the units report to this object.
  void attach();

  void begins(size_t unit) override;
  void returns(size_t unit, const std::vector<at::Tensor>& outputs) override;
  void ends(size_t unit) noexcept override;

  /// Shows the other ranks that this rank is in that call of the model.
  CallPlace::Call place(const std::string& call) const;
  void check_usable() const;
  void check_between_backwards(const std::string& call);
  fully_sharded::EditCheck& edits() { return edits_; }
  const std::shared_ptr<const fully_sharded::MachineGroups>& groups() const { return groups_; }
  /// Called when an optimizer is made, which keeps the result. TORCH_CHECK fails if there is one.
  std::shared_ptr<void> expect_steps();
  /// The reason why this rank's parts cannot be stepped or limited; empty if none. First clears in the parts what the
  /// module's zero_grad() has cleared.
  std::string trouble_before(const std::string& call);
  /// trouble_before(), for a call that uses gradients.
  std::string trouble_of_gradients(const std::string& call);
  /// Accepts the present gradients in the parts.
  void accept_gradients() { fully_sharded::mark_gradients(units_); }
  void after_step();
  /// Throws on all ranks unless all are at this call of this model, between two backwards.
  /// REQUIRES: every rank calls it.
  void meet_before(const std::string& call);
  fully_sharded::Contents contents() { return {*module_, *groups_, units_, edits_, gathering_}; }
  FullyShardedStats stats() const;

 private:
  enum class Phase { kIdle, kBackward, kFailed };
  struct Backward {
    Phase phase = Phase::kIdle;
    int number = 0;                   ///< of the last one that has begun
    std::optional<size_t> open = {};  ///< the unit whose backward is running
    std::string trouble = {};         ///< of this rank; all are told at its end
  };
  /// A unit's forward that a backward may follow. Exists as long as its graph.
  struct Use {
    size_t unit;
    int64_t changes;   ///< of its parameters until then
    int backward = 0;  ///< in which it was seen; 0: none
  };

  void use_in_forward(size_t unit);
  /// Tells all ranks what `body`, of `call`, throws.
  void telling(const std::string& call, const std::function<void()>& body);
  void backward_reaches(Use& use);
  void backward_begins();
  void note_trouble(const std::string& trouble);
  void finish_open();
  void backward_ended();

  TensorMemory memory_{/*keep=*/true, /*tight=*/true};
  const std::shared_ptr<torch::nn::Module> module_;
  const fully_sharded::FoundUnits found_;
  const std::shared_ptr<const fully_sharded::MachineGroups> groups_;
  fully_sharded::FailureWatch watch_;
  fully_sharded::UseCheck check_;
  std::deque<fully_sharded::Unit> units_;
  fully_sharded::EditCheck edits_;
  fully_sharded::Gathering gathering_;
  fully_sharded::GradientParts gradients_;
  std::deque<GradientAlarm> alarms_;
  std::vector<std::weak_ptr<Use>> uses_;  ///< the last of each unit
  Backward backward_;
  struct Steps {
    bool expected = false;      ///< an optimizer was made
    std::weak_ptr<void> token;  ///< of the present optimizer
  } steps_;
};

}  // namespace lockstep
