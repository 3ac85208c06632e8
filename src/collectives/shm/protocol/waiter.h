#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "collectives/shm/protocol/counted_mutex.h"
#include "collectives/shm/protocol/groups_search.h"
#include "collectives/shm/protocol/progress_engine.h"
#include "collectives/shm/protocol/progress_set.h"
#include "collectives/shm/protocol/stuck_search.h"
#include "collectives/shm/protocol/verdict.h"
#include "collectives/shm/protocol/wait_policy.h"
#include "collectives/shm/protocol/work.h"
#include "collectives/shm/segment/futex.h"
#include "collectives/shm/segment/world.h"

namespace lockstep::shm {

class Communicator;

/// Waits for other ranks: makes progress meanwhile, spins and sleeps as WaitPolicy says, and ends the group when a rank
/// that it waits for has ended, when ranks wait for each other, when time is up or when the program is interrupted.
/// Guarded by the communicator's mutex, `mutex` below, which is let go in between.
class Waiter {
 public:
  Waiter(const World& world, ProgressEngine& engine, ProgressSet& set, const Communicator& communicator)
      : world_(world), engine_(engine), set_(set), communicator_(communicator), stuck_search_(world) {}

  /// The thread that calls is one that uses the group; see StuckSearch.
  void note_caller() { stuck_search_.note_caller(); }
  /// Ranks that wait for each other's messages are told after two seconds, while one thread of a rank calls its group.
  /// With this, other threads may call at any time, and nobody is told.
  void expect_several_callers() { stuck_search_.expect_several_callers(); }
  /// What waits in this group tells `search`, which knows the group, of itself, and learns from it.
  void search_groups(std::shared_ptr<GroupsSearch> search) { groups_search_ = std::move(search); }
  /// What this rank has called of the group.
  Waiting calls();
  /// Ends the group because the culprit and others wait for each other.
  void end_stuck(Verdict::Cause cause, int culprit, const std::string& text);

  /// Returns when `work` is done. Throws nothing but an Interruption, when the group has ended.
  void wait(CountedMutex& mutex, const Work& work, std::chrono::milliseconds timeout) LOCKSTEP_REQUIRES(mutex) {
    WaitPolicy policy(world_.spin(), timeout);
    wait(mutex, work, policy);
  }
  /// The same, for a wait that may have begun with spin().
  void wait(CountedMutex& mutex, const Work& work, WaitPolicy& policy) LOCKSTEP_REQUIRES(mutex);
  /// Spins until `ready`, for as long as a wait for `rank` would before it does anything else. Makes no progress: for a
  /// caller for whom nothing else is pending.
  template <typename Ready>
  void spin(const CountedMutex& mutex, int rank, WaitPolicy& policy, const Ready& ready) LOCKSTEP_REQUIRES(mutex) {
    for (unsigned polls = 0; !ready(); ++polls) {
      if (polls < kFastPolls) continue;
      const bool needed = mutex.is_waited_for() || processor_is_needed(world_.bit(rank));
      if (policy.next(needed) != WaitPolicy::Step::kSpin) return;
      cpu_pause();
    }
  }
  /// See Communicator::poll.
  void poll(CountedMutex& mutex, const Work& work, std::chrono::microseconds at_most) LOCKSTEP_REQUIRES(mutex);

 private:
  /// A peer that arrives at the same time answers within these polls (0.1 us). What is done between later polls would
  /// take as long again.
  static constexpr unsigned kFastPolls = 16;

  void sleep(CountedMutex& mutex, const Work& work, std::chrono::microseconds at_most) LOCKSTEP_REQUIRES(mutex);
  /// Whether one of these ranks, for which this one waits, was last seen on the processor this thread runs on.
  bool processor_is_needed(uint64_t ranks);
  /// `waited`: what the caller's thread waits for; null: it is not for itself that it waits.
  void find_departed_peers(const Work* waited);
  void find_stuck_ranks(const Work& waited);
  void find_stuck_groups(const Work& waited);
  Waiting describe(const Work& waited);
  void time_out(const Work& waited, const WaitPolicy& policy);
  /// Ends the group and throws the Interruption, if there is one.
  void stop_if_interrupted(CountedMutex& mutex) LOCKSTEP_REQUIRES(mutex);

  const World& world_;
  ProgressEngine& engine_;
  ProgressSet& set_;
  const Communicator& communicator_;  ///< only compared
  StuckSearch stuck_search_;
  std::shared_ptr<GroupsSearch> groups_search_;  ///< null: of this group alone
};

}  // namespace lockstep::shm
