#include "collectives/group_state.h"

namespace lockstep {

void Membership::add(const std::shared_ptr<Group::State>& group) {
  const std::lock_guard lock(mutex_);
  std::erase_if(groups_, [](const auto& known) { return known.expired(); });
  groups_.push_back(group);
}

void Membership::close() {
  open_ = false;
  const std::lock_guard lock(mutex_);
  for (const auto& known : groups_) {
    const auto group = known.lock();
    // Only of our own engine is it known that nobody is cut off who still reads what this rank has sent.
    if (group == nullptr || group->blocking == nullptr) continue;
    try {
      group->backend->shutdown();
    } catch (const std::exception&) {
      // This is a child that the rank has forked: the groups are not its own to leave.
    }
  }
}

}  // namespace lockstep
