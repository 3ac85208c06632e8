#include "reducer/hook_problems.h"

#include "collectives/group_state.h"

namespace lockstep {

std::string HookProblems::key(uint64_t reduction, int rank) const {
  return "hook_problem/" + std::to_string(object_) + "/" + std::to_string(reduction) + "/" + std::to_string(rank);
}

void HookProblems::post(uint64_t reduction, const std::string& problem) const {
  try {
    if (const auto& store = state_of(group_).store) store->set(key(reduction, group_.rank()), problem);
  } catch (const std::exception&) {
  }
}

std::string HookProblems::of_all_ranks(uint64_t reduction) const {
  const auto& store = state_of(group_).store;
  std::string text;
  if (!store || !any_hook_) return text;
  try {
    for (int rank = 0; rank < group_.world_size(); ++rank)
      if (store->check({key(reduction, rank)}))
        text += "\nrank " + std::to_string(rank) + ": " + store->get_to_str(key(reduction, rank));
  } catch (const std::exception&) {  // the store is gone with a rank
  }
  return text;
}

}  // namespace lockstep
