#pragma once

#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/summation_tree.h"

namespace lockstep {

/// The virtual ranks of a run, and the one that this process currently works for. Owned by the Context and shared by
/// its group, loaders, replicas and checkpoints. Used by the training thread.
///
/// A loader announces the virtual rank of its next batch (enter). This object then saves the random generator's state
/// and installs the other virtual rank's, so a virtual rank's random numbers do not depend on the process that works
/// for it. Between virtual ranks (leave) the process has a state of its own.
class VirtualRanks {
 public:
  /// The process's random generator, with its state as bytes.
  struct Generator {
    std::function<std::string()> read;
    std::function<void(const std::string&)> write;
  };
  /// `states` holds the generator's initial state for each virtual rank of this process's block.
  VirtualRanks(int count, int rank, int world_size, int threads, Generator generator, std::vector<std::string> states);

  int count() const { return count_; }
  int world_size() const { return world_size_; }
  /// The number of threads that an operator uses on every rank; 0 if ranks differ.
  int threads() const { return threads_; }
  LeafRange block() const { return block_; }
  int owner(int virtual_rank) const { return owner_of(virtual_rank, world_size_, count_); }
  /// Whether each rank works for exactly one virtual rank.
  bool one_each() const { return count_ == world_size_; }
  std::optional<int> current() const { return current_; }

  /// Switches to `virtual_rank`, unless it is the current one.
  /// REQUIRES: it is in block().
  void enter(int virtual_rank) { change(virtual_rank); }
  void leave() { change(std::nullopt); }

  /// The generator's states: of the process itself, then of each virtual rank in its block.
  std::vector<std::string> generator_states() const;
  void set_generator_states(const std::vector<std::string>& states);

  /// Called whenever the current virtual rank changes, before the generator's state does.
  using Listener = std::function<void(std::optional<int> from, std::optional<int> to)>;
  /// Calls `listener` while the result lives.
  [[nodiscard]] std::shared_ptr<void> listen(Listener listener);

  /// The virtual rank that this process works for, or -1: for code without access to the Context.
  static int current_of_process();

 private:
  void change(std::optional<int> to);
  std::string& state_of(std::optional<int> virtual_rank);

  const int count_, world_size_, threads_;
  const LeafRange block_;
  const Generator generator_;
  std::vector<std::string> states_;  ///< of the process, then of the block; the current one's is out of date
  std::optional<int> current_;
  const std::shared_ptr<std::list<Listener>> listeners_ = std::make_shared<std::list<Listener>>();
};

}  // namespace lockstep
