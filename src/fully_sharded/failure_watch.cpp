#include "fully_sharded/failure_watch.h"

#include "base/clock.h"
#include "base/shared_segment.h"
#include "collectives/engine_interfaces.h"
#include "collectives/group_state.h"
#include "rank_page/rank_board.h"

namespace lockstep::fully_sharded {
namespace {

constexpr std::chrono::milliseconds kLook{200};     ///< between two looks of a rank that waits
constexpr std::chrono::milliseconds kOthers{1000};  ///< for what the others say
constexpr std::chrono::milliseconds kPause{10};

// What ranks write: why one cannot go on; why all must end, for which there is one place; that this was read.
constexpr const char *kTrouble = "trouble", *kEnd = "end", *kRead = "read";

void interrupt(const Group& group, const std::string& why) {
  if (auto* const able = dynamic_cast<Interruptible*>(state_of(group).backend.get())) able->interrupt(why);
}

}  // namespace

FailureWatch::FailureWatch(const MachineGroups& groups, int model)
    : groups_(groups),
      prefix_("lockstep/fully_sharded/" + std::to_string(model) + '/'),
      generation_(fork_generation()) {
  if (groups_.all().world_size() == 1) return;
  for (const char* kind : {kTrouble, kEnd, kRead})  // of an earlier group over the same store
    state_of(groups_.all()).store->deleteKey(key(kind, groups_.all().rank()));
  thread_ = std::thread([this] { watch(); });
}

FailureWatch::~FailureWatch() {
  if (!thread_.joinable()) return;
  if (generation_ != fork_generation()) {  // a forked child has no such thread
    thread_.detach();
    return;
  }
  {
    const MutexLock lock(mutex_);
    stops_ = true;
  }
  wakes_.notify_all();
  thread_.join();
}

std::string FailureWatch::key(const char* kind, int rank) const {
  const MutexLock lock(mutex_);
  return prefix_ + std::to_string(told_) + '/' + kind + (kind == kEnd ? "" : '/' + std::to_string(rank));
}

void FailureWatch::write(const char* kind, const std::string& text) const {
  state_of(groups_.all()).store->set(key(kind, groups_.all().rank()), text);
}

bool FailureWatch::all_have_written(const char* kind) const {
  std::vector<std::string> keys;
  for (int rank = 0; rank < groups_.all().world_size(); ++rank) keys.push_back(key(kind, rank));
  return state_of(groups_.all()).store->check(keys);
}

void FailureWatch::end_groups(const std::string& why) const {
  for (const Group* group : {groups_.here(), groups_.rail(), &groups_.all()})
    if (group != nullptr) interrupt(*group, why);
}

void FailureWatch::tell(const std::string& trouble) noexcept {
  if (!thread_.joinable()) return;
  try {
    {
      const MutexLock lock(mutex_);
      if (ended_ || !groups_.all().is_open()) return;
    }
    const auto wait_for = [this](const char* kind) {
      const Deadline deadline(kOthers);
      while (!all_have_written(kind)) {
        if (deadline.passed()) return false;
        std::this_thread::sleep_for(kPause);
      }
      return true;
    };
    write(kTrouble, trouble);
    if (wait_for(kTrouble)) {
      const MutexLock lock(mutex_);
      ++told_;
      return;
    }
    const std::string why = "rank " + std::to_string(groups_.all().rank()) + ": " + trouble;
    write(kRead, "");
    write(kEnd, why);
    wait_for(kRead);
    {
      const MutexLock lock(mutex_);
      ended_ = true;
    }
    end_groups(why);
  } catch (const std::exception&) {  // the store has gone with a rank or the launcher, of which the engines tell
  }
}

void FailureWatch::watch() {
  const int ranks = groups_.all().world_size();
  while (true) {
    {
      MutexLock lock(mutex_);
      wakes_.wait_for(lock.native(), kLook);
      if (stops_ || ended_ || !groups_.all().is_open()) return;
    }
    if (!own_page().read(ranks).waiting) continue;
    try {
      c10d::Store& store = *state_of(groups_.all()).store;
      const std::string place = key(kEnd, 0);
      if (!store.check({place})) continue;
      const std::string why = store.get_to_str(place);
      write(kRead, "");
      {
        const MutexLock lock(mutex_);
        ended_ = true;
      }
      return end_groups(why);
    } catch (const std::exception&) {  // as above
      return;
    }
  }
}

}  // namespace lockstep::fully_sharded
