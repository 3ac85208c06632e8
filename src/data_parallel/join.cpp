#include <algorithm>
#include <utility>

#include <c10/util/ScopeExit.h>

#include "base/text.h"
#include "collectives/coalesced.h"
#include "collectives/group_state.h"
#include "data_parallel/replica_state.h"
#include "nn/batch_norm_operator.h"

namespace lockstep {
namespace {

/// While it lives, the reducer is within join().
class JoiningReducer {
 public:
  JoiningReducer(Reducer& reducer, const JoinOptions*& join, const JoinOptions& options)
      : reducer_(reducer), join_(join) {
    TORCH_CHECK(join_ == nullptr, "join() was called within join()");
    join_ = &options;
    reducer_.set_joining(true, !options.divide_by_initial_world_size);
  }
  ~JoiningReducer() {
    reducer_.set_joining(false, false);
    join_ = nullptr;
  }
  JoiningReducer(const JoiningReducer&) = delete;
  JoiningReducer& operator=(const JoiningReducer&) = delete;

 private:
  Reducer& reducer_;
  const JoinOptions*& join_;
};

/// Sets the joining state of synchronised batch norms, if there are any.
class JoiningStatistics {
 public:
  JoiningStatistics(std::shared_ptr<StatisticsExchange>& exchange, const Group& group) : exchange_(exchange) {
    exchange_ = exchange_within_join(group);
    if (exchange_) exchange_->set_joining(true);
  }
  ~JoiningStatistics() {
    if (exchange_) exchange_->set_joining(false);
    exchange_ = nullptr;
  }
  JoiningStatistics(const JoiningStatistics&) = delete;
  JoiningStatistics& operator=(const JoiningStatistics&) = delete;

 private:
  std::shared_ptr<StatisticsExchange>& exchange_;
};

/// Called when this rank's inputs have ended. What waits in .grad then is not part of the others' reductions.
void drop_and_warn(const ReplicaState& state) {
  const int passes = state.reducer->drop_kept_back();
  if (passes == 0) return;
  TORCH_WARN("rank ", state.group.rank(), " of ", state.group.world_size(), ": the inputs of join() ended after ",
             counted(passes, "backward pass", "backward passes"), " of accumulate(", state.passes->last_accumulation,
             "), whose gradients are dropped. To count them, end the body with: if (!model.step_complete()) { "
             "model.reduce_gradients(); optimizer.step(); }");
}

}  // namespace

void Replica::join(const std::function<void()>& body, const JoinOptions& options) {
  State& state = *state_;
  const auto& virtual_ranks = lockstep::state_of(state.group).virtual_ranks;
  const int count = virtual_ranks ? virtual_ranks->count() : state.group.world_size();
  if (count == 1) return body();
  if (!options.enable) {
    const bool before = std::exchange(state.join.switched_off, true);
    const auto over = c10::make_scope_exit([&] { state.join.switched_off = before; });
    return body();
  }
  const JoiningReducer joining(*state.reducer, state.join.options, options);
  const JoiningStatistics joining_statistics(state.join.statistics, state.group);
  state.join.last_active.assign(static_cast<size_t>(count), true);
  body();
  drop_and_warn(state);
  // The others' reductions show which ranks still have inputs; join() ends with the round in which none has any. Each
  // reduction is preceded by the batch norms of its forward and backward.
  while (true) {
    if (state.join.statistics) state.join.statistics->serve();
    const auto ranks = state.reducer->shadow();
    if (std::none_of(ranks.begin(), ranks.end(), [](const Facts& facts) { return facts.active; })) break;
    state.join.shadowing = true;
    const auto over = c10::make_scope_exit([&] { state.join.shadowing = false; });
    if (options.shadow) options.shadow();
  }
  const auto last = static_cast<int>(std::find(state.join.last_active.begin(), state.join.last_active.end(), true) -
                                     state.join.last_active.begin());
  broadcast_parameters(virtual_ranks ? virtual_ranks->owner(last) : last);
}

}  // namespace lockstep
