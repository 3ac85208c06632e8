#include "fully_sharded/failure_watch.h"

#include <thread>

#include "base/clock.h"
#include "collectives/group_state.h"
#include "collectives/groups_watch.h"

namespace lockstep::fully_sharded {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kOthers{1000};  ///< time to wait for the others' reports
constexpr milliseconds kPause{10};

}  // namespace

FailureWatch::FailureWatch(const MachineGroups& groups, int model)
    : groups_(groups),
      caller_{.of = "a FullyShardedDataParallel",
              .advice =
                  "Every rank must make the same calls of the model, in the same order, and run as many forwards and "
                  "backwards",
              .scope = "lockstep/fully_sharded/" + groups.nonce() + '/' + std::to_string(model)},
      watch_(groups.all().world_size() == 1 ? nullptr : state_of(groups.all()).membership->watch()) {
  if (watch_ != nullptr) watch_->start();
}

FailureWatch::~FailureWatch() {
  if (watch_ != nullptr && groups_.all().is_open()) watch_->leave(caller_.scope, "has destroyed its model");
}

bool FailureWatch::all_have_trouble() const {
  std::vector<std::string> keys;
  for (int rank = 0; rank < groups_.all().world_size(); ++rank) keys.push_back(key(rank));
  for (const Deadline deadline(kOthers); !state_of(groups_.all()).store->check(keys);) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(kPause);
  }
  return true;
}

void FailureWatch::tell(const std::string& trouble) noexcept {
  const Group& all = groups_.all();
  if (watch_ == nullptr || !all.is_open() || !watch_->told().empty()) return;
  try {
    state_of(all).store->set(key(all.rank()), trouble);
    if (all_have_trouble()) {
      ++told_;
      return;
    }
    std::vector<int> ranks;
    for (int rank = 0; rank < all.world_size(); ++rank) ranks.push_back(state_of(all).number_of_all(rank));
    watch_->end(ranks, "rank " + std::to_string(all.rank()) + ": " + trouble);
  } catch (const std::exception&) {  // the store is gone with a rank or the launcher, which the engines report
  }
}

std::string FailureWatch::departed() const noexcept { return watch_ == nullptr ? "" : watch_->departed(caller_.scope); }

}  // namespace lockstep::fully_sharded
