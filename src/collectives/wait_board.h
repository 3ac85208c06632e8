#pragma once

#include <list>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "collectives/told_wait.h"

namespace lockstep {

/// Where ranks tell each other what they wait for: keys of a store. A store that fails tells nobody anything.
class WaitBoard {
 public:
  /// Deletes what this rank wrote for an earlier group over the same store.
  WaitBoard(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size);

  int rank() const { return rank_; }
  void tell(const ToldWait& wait) { store_->set(key(rank_), wait.packed()); }
  /// This rank no longer waits. Never throws.
  void take_back();
  /// The announcements of all ranks; this rank's is `own`.
  std::vector<ToldWait> read(const ToldWait& own);

  /// Why the group has ended, for all ranks. Never throws.
  void declare(const std::string& verdict);
  /// Empty: it has not.
  std::string verdict();

  /// Leaves for the others, as this rank leaves, the tags of what it has sent and they have not received. Never throws.
  void leave_tags(const std::list<NotedMessage>& pending);
  /// A receive from that rank has failed: what it left by leave_tags(). Empty: nothing.
  std::string unreceived_from(int rank);

 private:
  static std::string key_of_tags(int from, int to) {
    return "unreceived/" + std::to_string(from) + "/" + std::to_string(to);
  }
  static std::string key(int rank) { return "waits/" + std::to_string(rank); }

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_, world_size_;
};

}  // namespace lockstep
