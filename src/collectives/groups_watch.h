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

/// Finds ranks that wait for each other in different groups, where no engine sees it, and tells them which rank waits
/// where.
///
/// A rank that has waited in one place for a second writes the place, and its calls in each group, into the store of
/// all ranks, and reads the other ranks' records. Ranks are told only if it is certain that none can continue: each
/// waits for a call that another of them has not made, and cannot make while it waits. So a rank that computes or is
/// stopped is never in such a cycle, nor is a rank of which several threads wait, or another thread may still call a
/// group. Nothing is sent while training progresses. A thread does this; it runs once a second group exists, whatever
/// its ranks. Ranks that wait for each other in one group are left to its engine, unless the engine is silent.
class GroupsWatch {
 public:
  /// `all` is the group of all ranks.
  explicit GroupsWatch(Group::State& all);
  ~GroupsWatch() { stop(); }
  GroupsWatch(const GroupsWatch&) = delete;
  GroupsWatch& operator=(const GroupsWatch&) = delete;

  /// Starts the thread; no effect if it runs already. Called on the training thread.
  void start();
  /// Stops detection.
  void stop() { thread_.stop(); }

  /// Ends the groups, and waits in them, with `why` on these ranks, which cannot continue. This rank is one of them.
  void end(const std::vector<int>& ranks, const std::string& why) noexcept;
  /// Records that this rank makes no more calls of that scope (CallPlace). `place` says why: "has destroyed its model".
  void leave(const std::string& scope, const std::string& place) noexcept;
  /// "rank 3 has destroyed its model"; empty: no rank is known to have left.
  std::string departed(const std::string& scope) const noexcept;

  /// The reason why this rank's groups ended; empty: they have not. Any thread may call.
  std::string told() const;

 private:
  /// Constant while this rank waits in one place.
  struct Wait {
    uint64_t group, number, beats;
    std::optional<WaitRecord::Message> message;
    bool operator==(const Wait&) const = default;
  };
  /// A snapshot of this rank.
  struct Look {
    RankStatus status;
    std::optional<WaitedMessage::Seen> message;
    /// None: it is not waiting.
    std::optional<Wait> wait() const;
  };

  bool look();
  /// Notes on the page whether a thread other than the one that waits may use a group next.
  static void note_callers();
  /// Called when this rank has waited in one place for long.
  void compare();
  Look look_at_self() const;
  WaitRecord record_of(const Look& here) const;
  /// Counts the calls of each group of this process.
  void count_calls(WaitRecord& record, const RankStatus& status) const;
  void withdraw();
  /// Whether the ranks have been seen in these waits before, and this one has waited long enough to say so.
  bool is_certain(const WaitRecords& records, const std::vector<bool>& stuck, const Departures& gone);
  void finish(const GroupsBoard::Verdict& verdict);

  Group::State& all_;
  const GroupsBoard board_;
  std::vector<uint64_t> bits_;  ///< of each rank, in WaitRecord::needs

  // Used by the thread.
  std::optional<Wait> wait_;
  uint64_t serial_ = 0;  ///< of that wait
  Clock::time_point since_, next_comparison_;
  std::chrono::milliseconds interval_{0};
  std::vector<uint64_t> seen_;  ///< serials of ranks that can never continue; 0: it may
  bool has_said_ = false;       ///< has published a record that the others can read

  mutable Mutex mutex_;
  std::string told_ LOCKSTEP_GUARDED_BY(mutex_);
  WatchingThread thread_;  // last: it uses all the others
};

}  // namespace lockstep
