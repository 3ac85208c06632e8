#pragma once

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <lockstep/replica.h>

#include "data_parallel/attached_model.h"
#include "data_parallel/source.h"
#include "data_parallel/synchronization.h"
#include "data_parallel/tensor_memory.h"
#include "nn/statistics_exchange.h"
#include "reducer/reducer.h"

namespace lockstep {

struct JoinState {
  const JoinOptions* options = nullptr;            ///< null: outside join()
  bool switched_off = false;                       ///< within a join() whose options say so
  bool shadowing = false;                          ///< within JoinOptions::shadow
  std::shared_ptr<StatisticsExchange> statistics;  ///< the synchronised batch norms', or null
  std::vector<bool> last_active;                   ///< ranks that had inputs in the last reduction in which any had
};

struct Replica::State {
  State(std::unique_ptr<Source> from, const Group& group, DistributedDataParallelOptions options);

  /// Compares across ranks what `from` (null: the present source) holds now, sets new tensors to rank 0's values, and
  /// follows them all. If it throws, it throws on all ranks, and everything is followed as before.
  void attach(std::unique_ptr<Source> from);
  /// Throws on all ranks if the model was edited on one of them.
  /// REQUIRES: every rank calls it.
  void check_not_edited();
  /// Runs the check of check_divergence_every(), if it is due, before an optimizer writes parameters of all ranks.
  /// REQUIRES: every rank calls it, in a step in which all have inputs.
  void check_before_step() const { synchronization.check_before_step(/*counted_later=*/is_deferred()); }

  /// Null: backward reduces again.
  /// REQUIRES: every rank calls it, between backward passes.
  void set_shared_step(SharedStep* step);
  /// The step that takes the sum of gradients. Null if backward reduces, as with a communication hook or when ranks
  /// work for several virtual ranks.
  SharedStep* deferred_step() const;
  bool is_deferred() const { return deferred_step() != nullptr; }

  /// Tells optimizers, which hold it, whether this object still exists.
  const std::shared_ptr<const bool> alive = std::make_shared<const bool>(true);
  const Group group;
  const DistributedDataParallelOptions options;
  TensorMemory memory{options.keep_freed_memory};
  const std::shared_ptr<BackwardPasses> passes = std::make_shared<BackwardPasses>();  ///< shared by guards
  AttachedModel attached;
  Synchronization synchronization{group, options, attached};
  ReductionEquipment equipment{.hook = nullptr, .watch = nullptr, .timeline = std::make_shared<Timeline>()};
  std::unique_ptr<Reducer> reducer;
  int attachments = 0;  ///< reducers so far, the same on all ranks
  /// An optimizer's step, or null. It may sum the gradients itself: backward then leaves this rank's own gradients in
  /// .grad.
  SharedStep* shared_step = nullptr;
  JoinState join;

 private:
  std::unique_ptr<Reducer> make_reducer(const NamedTensors& followed, const Source& from);
  /// Makes a reducer, and then records for each of `handles` the number of handles that it takes.
  std::unique_ptr<Reducer> make_counted_reducer(const NamedTensors& followed, const Source& from,
                                                std::unordered_map<const c10::TensorImpl*, size_t>& handles);
  /// The reason why these cannot be followed; empty if none. The text may differ by rank.
  std::string problem_of(const AttachedModel::Tensors& now, const Source& from) const;
  void compare(const AttachedModel::Tensors& now) const;
  /// Throws on all ranks if one has a `trouble`, or is at another replica.
  /// REQUIRES: every rank calls it.
  void throw_on_all_ranks(const std::string& trouble) const;
  void check_weights(const NamedTensors& parameters) const;
  NamedTensors to_follow(const NamedTensors& parameters) const;
  ReplicaSettings own_settings() const;
  /// Called after each reduction, on all ranks.
  void reduced(const std::vector<Facts>& ranks);

  int number_ = 0;  ///< of this replica on its group, from 1; the same on all ranks
  std::optional<BackwardWatch> watch_;
};

/// Gives an optimizer that steps its gradients access to a replica's state.
Replica::State& state_of(const Replica& replica);
using ReplicaState = std::remove_reference_t<decltype(state_of(std::declval<const Replica&>()))>;

}  // namespace lockstep
