#pragma once

#include <list>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "collectives/told_wait.h"

namespace lockstep {

/// The announcements by which ranks tell each other what they wait for, as keys of a store. If the store fails, nothing
/// is announced.
class WaitBoard {
 public:
  /// Deletes this rank's records of an earlier group over the same store.
  WaitBoard(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size);

  int rank() const { return rank_; }
  void tell(const ToldWait& wait) { store_->set(key(rank_), wait.packed()); }
  /// Withdraws this rank's announcement. Never throws.
  void take_back();
  /// The announcements of all ranks; this rank's is `own`.
  std::vector<ToldWait> read(const ToldWait& own);

  /// Publishes the reason for the group's end to all ranks. Never throws.
  void declare(const std::string& verdict);
  /// The published reason; empty if none.
  std::string verdict();

  /// Publishes that this rank leaves, and the tags of messages that it has sent and the others have not received. Never
  /// throws.
  void leave(const std::list<NotedMessage>& pending);
  /// Why this rank's message has failed, if its peer has left the group; else empty. Tells this rank's page.
  std::string departure(const NotedMessage& message);

 private:
  static std::string key_of_tags(int from, int to) {
    return "unreceived/" + std::to_string(from) + "/" + std::to_string(to);
  }
  static std::string key_of_leave(int rank) { return "left/" + std::to_string(rank); }
  static std::string key(int rank) { return "waits/" + std::to_string(rank); }

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_, world_size_;
};

}  // namespace lockstep
