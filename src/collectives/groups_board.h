#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "collectives/wait_record.h"

namespace lockstep {

/// The records by which the ranks of a GroupsWatch inform each other, as keys of a store. Throws if the store is gone.
/// Any thread may use it.
class GroupsBoard {
 public:
  /// REQUIRES: no earlier board has used `store`.
  GroupsBoard(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size)
      : store_(std::move(store)), rank_(rank), world_size_(world_size) {}

  /// Writes this rank's record; none: withdraws it.
  void say(const std::optional<WaitRecord>& own) const;
  /// The records of all ranks; this rank's is `own`.
  WaitRecords records(const WaitRecord& own) const;

  void leave(const std::string& scope, const WaitRecord& own) const;
  /// The departures of all ranks; empty if none has left.
  WaitRecords departures(const std::string& scope) const;

  /// Whether this rank is the first that asks about `what`.
  bool is_first(const std::string& what) const { return store_->add(kPrefix + ("first/" + what), 1) == 1; }

  /// The reason why ranks must end.
  struct Verdict {
    std::vector<int> ranks;
    bool is_deadlock = false;  ///< otherwise one of them cannot continue
    std::string why;
  };
  void tell(const Verdict& verdict) const;
  /// The verdict that this rank has been told.
  std::optional<Verdict> told() const;
  void note_read() const { store_->set(key("read", rank_), std::string("yes")); }
  bool have_read(const std::vector<int>& ranks) const;

 private:
  static constexpr const char* kPrefix = "groups_watch/";
  static std::string key(const std::string& kind, int rank) { return kPrefix + kind + '/' + std::to_string(rank); }
  std::optional<WaitRecord> read(const std::string& kind, int rank) const;

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_, world_size_;
};

}  // namespace lockstep
