#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "base/watching_thread.h"
#include "fully_sharded/machine_groups.h"
#include "fully_sharded/rank_record.h"
#include "rank_page/rank_page.h"

namespace lockstep::fully_sharded {

/// Tells all ranks what keeps them from going on, where they wait in groups of some ranks each, so that no engine sees
/// it: that one cannot go on in the middle of a forward or backward, or that they wait for each other in different
/// calls. They learn it through the group's store. While a rank waits, a thread of it looks there a few times a second;
/// once it has waited for a second, it says where, and reads where the others wait. Nothing is sent while training
/// progresses.
class FailureWatch {
 public:
  /// `model`: its number among the group's models.
  FailureWatch(const MachineGroups& groups, int model);
  /// This rank calls nothing more of the model: ranks that wait for it are told.
  ~FailureWatch();
  FailureWatch(const FailureWatch&) = delete;
  FailureWatch& operator=(const FailureWatch&) = delete;

  /// This rank cannot go on: `trouble`. Where all ranks say so within a second, nothing else happens, since they are at
  /// the same place. Otherwise the waits of all ranks end with it, and their groups. The thread that trains calls it.
  void tell(const std::string& trouble) noexcept;
  /// The ranks that have destroyed their model: "rank 3 has destroyed its model"; empty if none is known to have.
  std::string departed() const noexcept;

 private:
  /// What does not change while a rank waits in one place.
  struct Wait {
    uint64_t group, collective, beats;
    bool operator==(const Wait&) const = default;
  };

  std::string key(const char* kind, int rank) const;
  std::string record_key(int rank) const { return prefix_ + "record/" + std::to_string(rank); }
  bool all_have_written(const char* kind, const std::vector<bool>& by) const;
  bool wait_until_written(const char* kind, const std::vector<bool>& by) const;
  void write(const char* kind, const std::string& text) const;
  /// Tells the ranks in `waiting` why all end, and ends.
  void end_all(const std::string& why, const std::vector<bool>& waiting);
  /// Ends this rank's waits.
  void end(const std::string& why);
  bool is_over() const;
  /// A look of the thread.
  bool look();
  /// This rank has waited in one place for long.
  void compare_waits();
  RankRecord own_record(const RankStatus& status) const;
  RankRecords exchanged(const RankRecord& own);
  RankRecords records() const;

  const MachineGroups& groups_;
  const std::string prefix_;
  std::vector<uint64_t> bits_;  ///< of each rank, in RankRecord::needs

  // Of the thread.
  std::optional<Wait> wait_;
  Clock::time_point next_comparison_;
  std::chrono::milliseconds pause_{0};
  bool found_ = false;  ///< in this wait, ranks that never go on
  std::string said_;    ///< the record that the others can read; empty: none

  mutable Mutex mutex_;
  bool ended_ LOCKSTEP_GUARDED_BY(mutex_) = false;  ///< the groups have
  int told_ LOCKSTEP_GUARDED_BY(mutex_) = 0;        ///< how often all ranks have said that they cannot go on
  WatchingThread thread_;                           // last: it uses all the others
};

}  // namespace lockstep::fully_sharded
