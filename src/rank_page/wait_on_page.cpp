#include "rank_page/wait_on_page.h"

#include "base/mutex.h"

namespace lockstep {
namespace {

struct Waits {
  Mutex mutex;
  WaitOnPage* last LOCKSTEP_GUARDED_BY(mutex) = nullptr;  ///< the one that the page shows; null: none
};

/// Never destroyed: a thread may wait while the process ends.
Waits& waits() {
  static auto* const kWaits = new Waits;
  return *kWaits;
}

}  // namespace

WaitOnPage::WaitOnPage(int group, const RankStatus::Awaited& awaited) : group_(group), awaited_(awaited) {
  const MutexLock lock(waits().mutex);
  earlier_ = waits().last;
  if (earlier_ != nullptr) earlier_->later_ = this;
  waits().last = this;
  own_page().begin_wait(group_, awaited_);
}

WaitOnPage::~WaitOnPage() {
  const MutexLock lock(waits().mutex);
  if (earlier_ != nullptr) earlier_->later_ = later_;
  if (later_ != nullptr) {
    later_->earlier_ = earlier_;  // the page shows a later wait
    return;
  }
  waits().last = earlier_;
  if (earlier_ == nullptr) {
    own_page().set_waiting(false);
    return;
  }
  own_page().set_waits_for(0);  // this thread's; the other one announces its own again as it sleeps
  own_page().begin_wait(earlier_->group_, earlier_->awaited_);
}

}  // namespace lockstep
