#include <utility>

#include "base/error.h"
#include "collectives/shm/backend/handles.h"
#include "collectives/shm/backend/shm_backend.h"
#include "rank_page/rank_board.h"

// c10d::Backend::reconfigure(): survivors of a rank that died, and processes that join them, form a group in the same
// backend object.

namespace lockstep::shm_engine {

void ShmBackend::throw_unformed() {
  throw Error("the group has no ranks yet: it was made with enable_reconfigure=True; form it by reconfigure() first");
}

std::string ShmBackend::handle() const {
  const MutexLock lock(mutex_);
  if (handle_.empty()) handle_ = new_handle(getRank());
  return handle_;
}

void ShmBackend::regroup(Regrouping regrouping) {
  const std::string mine = handle();
  {
    const MutexLock lock(mutex_);
    if (!uuids_.insert(regrouping.uuid).second)
      throw Error("reconfigure(): uuid " + std::to_string(regrouping.uuid) +
                  " was already used by this group; give each call a new one that is the same on all ranks");
  }
  const auto timeout = bounded(regrouping.timeout.value_or(kNoTimeout));
  auto world = form_by_handles(mine, regrouping.handles, regrouping.uuid, timeout);
  join(std::make_shared<BackendState>(std::move(world)));
}

void ShmBackend::join(BackendStatePtr group) {
  std::swap(shared_, group);
  if (group) group->core().leave();
  become(shared_->core().rank(), shared_->core().size());
  sequence_ = 0;
  {
    const MutexLock lock(mutex_);
    coalescing_.reset();
  }
  memory_.forget();
  if (!writes_page_) return;
  shared_->core().with_waiter([](shm::Waiter& waiter) { waiter.expect_several_callers(); });
  own_page().communicates();
  show_group();
}

}  // namespace lockstep::shm_engine
