#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <lockstep/replica.h>

#include "data_parallel/source.h"
#include "data_parallel/tensor_memory.h"
#include "data_parallel/untrained_watch.h"
#include "data_parallel/virtual_buffers.h"
#include "nn/statistics_exchange.h"
#include "reducer/reducer.h"

namespace lockstep {

struct Replica::State {
  State(std::unique_ptr<Source> from, const Group& group, DistributedDataParallelOptions options);

  // attach.cpp
  /// Compares across ranks what `from` (or, if null, the present source) holds now, sets what is new to rank 0's
  /// values, and follows it. If it throws, it throws on all ranks, and everything is followed as before.
  void attach(std::unique_ptr<Source> from);
  /// What was changed in the module since attach() without a refresh(); empty if nothing.
  std::string inspect();
  /// The source is about to hold these: inspect() looks whether it does, and a backward that reaches nothing but them is
  /// noticed.
  void expect(const std::vector<at::Tensor>& tensors);
  /// Throws on all ranks if inspect() finds something on one of them. Every rank calls it.
  void check_not_edited();

  // synchronize.cpp
  /// After each reduction, on all ranks.
  void reduced(const std::vector<Facts>& ranks);
  /// From the ranks for which `counts` is true.
  void synchronize_buffers(const std::vector<bool>& counts);
  void average(const NamedTensors& tensors, double share, int root);
  void check_divergence() const;
  /// Of the buffers, if `as_left` those that every rank computes alike.
  void check_buffers(bool as_left) const;
  /// The check of check_divergence_every(), if it is due, before an optimizer writes parameters of all ranks. Every rank
  /// calls it, in a step in which all have inputs.
  void check_before_step() const;
  /// Whether the object still is; optimizers hold it.
  const std::shared_ptr<const bool> alive = std::make_shared<const bool>(true);

  /// Whether this rank, or another, works for several virtual ranks: gradients are then added in backward, and no
  /// optimizer can take their sum.
  bool several_virtual_ranks() const { return lockstep::several_virtual_ranks(group) != nullptr; }

  /// A parameter as it was when it was attached; none of this may change without refresh().
  struct Known {
    std::string name;
    at::Tensor tensor;
    at::TensorOptions options;
    int64_t elements;
    bool followed;
    size_t own_handles = 0;  ///< on a list's tensor, of this library; 0: unknown
  };

  const Group group;
  const DistributedDataParallelOptions options;
  TensorMemory memory{options.keep_freed_memory};
  const std::shared_ptr<BackwardPasses> shared_passes = std::make_shared<BackwardPasses>();  ///< guards share it
  BackwardPasses& passes = *shared_passes;

  std::unique_ptr<Source> source;
  std::vector<Known> known;
  std::unordered_set<const c10::TensorImpl*> kept_list;  ///< on which the derived object has one more handle
  NamedTensors buffers;
  NamedTensors trained;  ///< the parameters that are followed, in the reducer's order
  Reducer::Equipment equipment{.hook = nullptr, .watch = nullptr, .timeline = std::make_shared<Timeline>()};
  std::unique_ptr<Reducer> reducer;
  int attachments = 0;  ///< reducers so far, the same on all ranks

  /// That of an optimizer, or null. It may take the sum of gradients itself: backward then leaves in .grad what this rank
  /// has computed.
  SharedStep* shared_step = nullptr;
  /// The step that takes the sum, or null. Null, so that backward reduces, with a communication hook, and where ranks work for several
  /// virtual ranks.
  SharedStep* deferred_step() const;
  bool is_deferred() const { return deferred_step() != nullptr; }
  /// Every rank calls it, between backward passes. Null: backward reduces again.
  void set_shared_step(SharedStep* step);

  std::unique_ptr<VirtualBuffers> virtual_buffers;  ///< null unless there are several virtual ranks and buffers

  int check_every = 0;
  bool check_buffers_as_left = false;
  int64_t reductions = 0;                          ///< since check_divergence_every() was called
  int64_t void_steps = 0;                          ///< steps that skip_step() has made void
  const JoinOptions* join = nullptr;               ///< within join()
  bool shadowing = false;                          ///< within JoinOptions::shadow
  std::shared_ptr<StatisticsExchange> statistics;  ///< within join(): that of synchronised batch norms, or null
  std::vector<bool> last_active;                   ///< ranks that had inputs in the last reduction in which any had

 private:
  std::unique_ptr<Reducer> make_reducer(const NamedTensors& followed, const Source& from);
  /// The same; then notes for each of `handles` how many handles on it that takes.
  std::unique_ptr<Reducer> make_counted_reducer(const NamedTensors& followed, const Source& from,
                                                std::unordered_map<const c10::TensorImpl*, size_t>& handles);
  /// What keeps these from being followed; empty if nothing does. The text need not be the same on all ranks.
  std::string problem_of(const NamedTensors& parameters, const NamedTensors& new_buffers, const Source& from) const;
  /// A parameter of a list that only this library holds, which nobody can train any more; empty if there is none.
  std::string left_behind() const;
  void follow_virtual_buffers();
  /// Before a backward: sets alarms on parameters of the module that are not followed.
  void watch_strangers();
  bool is_known(const at::Tensor& tensor) const { return impls_.contains(tensor.unsafeGetTensorImpl()); }
  void compare(const NamedTensors& parameters, const NamedTensors& new_buffers) const;
  void check_weights(const NamedTensors& parameters) const;
  NamedTensors to_follow(const NamedTensors& parameters) const;

  int number_ = 0;                                    ///< of this replica on its group, from 1: the same on all ranks
  std::unordered_set<const c10::TensorImpl*> impls_;  ///< of known and buffers
  bool edited_ = false;                               ///< the source has reported an edit; it is not asked again
  // Without these, a backward that reaches one of them but nothing that is followed would go unnoticed.
  std::vector<std::unique_ptr<GradientAlarm>> frozen_;     ///< known but not followed: may be unfrozen
  std::vector<std::unique_ptr<GradientAlarm>> strangers_;  ///< were added since
  std::optional<BackwardWatch> watch_;
  UntrainedWatch untrained_;  ///< used on rank 0 only
};

/// What an optimizer that steps its gradients needs to know of a replica.
Replica::State& state_of(const Replica& replica);
using ReplicaState = std::remove_reference_t<decltype(state_of(std::declval<const Replica&>()))>;

}  // namespace lockstep
