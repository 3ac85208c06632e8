#include "reducer/entered_virtual_rank.h"

#include <utility>

#include "collectives/group_state.h"

namespace lockstep {

EnteredVirtualRank::EnteredVirtualRank(const Group& group, std::function<void(std::optional<int> from)> changes)
    : ranks_(state_of(group).virtual_ranks),
      entered_(ranks_ && ranks_->current().has_value()),
      listening_(!ranks_ ? nullptr
                         : ranks_->listen(
                               [this, changes = std::move(changes)](std::optional<int> from, std::optional<int> to) {
                                 if (to) entered_ = true;
                                 changes(from);
                               })) {}

std::string EnteredVirtualRank::objection() const {
  if (!ranks_ || entered_) return "";
  return "a backward ran before this rank had entered a virtual rank, so it would not use the random numbers of "
         "virtual rank " +
         std::to_string(ranks_->block().first) +
         "; call context.enter_virtual_rank(v) before each virtual rank's micro-batch, or take batches from a "
         "DataLoader made from the Context, which calls it";
}

void EnteredVirtualRank::check(const CommHook* hook) const {
  TORCH_CHECK(!ranks_ || hook == nullptr || hook->travels_as(at::kFloat),
              "this communication hook cannot be used with virtual ranks, because its state or its messages belong to "
              "a process; use fp16_compress_hook(), bf16_compress_hook() or none, or leave out virtual_ranks");
}

}  // namespace lockstep
