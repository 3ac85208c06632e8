#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/group.h>

#include "base/clock.h"
#include "base/mutex.h"
#include "base/watching_thread.h"
#include "collectives/groups_board.h"
#include "collectives/waited_message.h"
#include "rank_page/rank_page.h"

namespace lockstep {

/// Finds ranks that wait for each other in different groups, where no engine sees it, and tells them who waits where.
///
/// Once a rank has waited in one place for a second, it writes into the store of all ranks where that is, and what it
/// has called in each group; and it reads that of the others. Ranks are told only if it is certain that none can go on:
/// each waits for a call that another of them has not made, and cannot make while it waits. So a rank that computes or
/// is stopped is waited for, and a rank of which several threads call groups is in no such cycle. Nothing is sent while
/// training progresses. A thread does all that; it runs once there is a second group, of whichever ranks. Ranks that
/// wait for each other in one group are left to its engine, unless that is silent.
class GroupsWatch {
 public:
  /// Of the group of all ranks.
  explicit GroupsWatch(Group::State& all);
  ~GroupsWatch() { stop(); }
  GroupsWatch(const GroupsWatch&) = delete;
  GroupsWatch& operator=(const GroupsWatch&) = delete;

  /// The thread that trains. If it runs already, without effect.
  void start();
  /// Nothing is found any more.
  void stop() { thread_.stop(); }

  /// These ranks cannot go on, and this is one of them: the groups end on all of them, and waits with `why`.
  void end(const std::vector<int>& ranks, const std::string& why) noexcept;
  /// This rank makes no more calls of that scope (CallPlace), for it `place`: "has destroyed its model".
  void leave(const std::string& scope, const std::string& place) noexcept;
  /// "rank 3 has destroyed its model"; empty: none is known to have left.
  std::string departed(const std::string& scope) const noexcept;

  /// Why this rank's groups ended; empty: they did not. From any thread.
  std::string told() const;

 private:
  /// What does not change while this rank waits in one place.
  struct Wait {
    uint64_t group, number, beats;
    std::optional<WaitRecord::Message> message;
    bool operator==(const Wait&) const = default;
  };
  /// A look at this rank.
  struct Look {
    RankStatus status;
    std::optional<WaitedMessage::Seen> message;
    /// None: it does not wait.
    std::optional<Wait> wait() const;
  };

  bool look();
  /// This rank has waited in one place for long.
  void compare();
  Look look_at_self() const;
  WaitRecord record_of(const Look& here) const;
  /// Of the groups of this process: how often each was called.
  void count_calls(WaitRecord& record, const RankStatus& status) const;
  void withdraw();
  /// Whether the ranks have been seen in these waits before, and this one has waited for long enough to say so.
  bool is_certain(const WaitRecords& records, const std::vector<bool>& stuck, const Departures& gone);
  void finish(const GroupsBoard::Verdict& verdict);

  Group::State& all_;
  const GroupsBoard board_;
  std::vector<uint64_t> bits_;  ///< of each rank, in WaitRecord::needs

  // Of the thread.
  std::optional<Wait> wait_;
  uint64_t serial_ = 0;  ///< of that wait
  Clock::time_point since_, next_comparison_;
  std::chrono::milliseconds interval_{0};
  std::vector<uint64_t> seen_;  ///< serials of ranks that can never go on; 0: it may
  bool has_said_ = false;       ///< a record that the others can read

  mutable Mutex mutex_;
  std::string told_ LOCKSTEP_GUARDED_BY(mutex_);
  WatchingThread thread_;  // last: it uses all the others
};

}  // namespace lockstep
