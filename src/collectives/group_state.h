#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <lockstep/group.h>

#include "base/mutex.h"
#include "base/shared_segment.h"
#include "base/virtual_ranks.h"
#include "collectives/call_guard.h"
#include "collectives/device_calls.h"
#include "collectives/device_works.h"
#include "collectives/engine_interfaces.h"
#include "collectives/message_counts.h"
#include "rank_page/page_group.h"

namespace lockstep {

/// Connects exactly the `world_size` ranks that share `store`.
/// REQUIRES: all of them call it.
using BackendFactory = std::function<c10::intrusive_ptr<c10d::Backend>(const c10::intrusive_ptr<c10d::Store>& store,
                                                                       int rank, int world_size)>;

/// A factory of engines for tensors on devices of one type. Throws if there is no engine for them.
using DeviceBackendFactory = std::function<c10::intrusive_ptr<c10d::Backend>(
    c10::DeviceType device, const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size)>;

struct EngineFactories {
  BackendFactory cpu;
  DeviceBackendFactory device;
  /// A name of a device that is the same in every process. Ranks whose devices have the same name are refused. May be
  /// null.
  std::function<std::string(c10::Device)> device_name = nullptr;
};

class GroupsWatch;

/// State shared by a Context's group and its subgroups, which the process leaves together.
class Membership {
 public:
  Membership();
  ~Membership();
  Membership(const Membership&) = delete;

  bool is_open() const { return open_; }
  void add(const std::shared_ptr<Group::State>& group);
  std::vector<std::shared_ptr<Group::State>> groups();
  /// Begins to watch the groups. `all` is the group of all ranks, the only one so far.
  void watch(Group::State& all);
  GroupsWatch* watch() const { return watch_.get(); }  ///< null: none
  /// Ends the waits of this rank in all groups with `why`.
  void interrupt(const std::string& why);
  /// The reason for the interrupt; empty: there was none.
  std::string told() const;
  /// Before close(): waits until this rank's collectives are done in all groups, for `patience` at most, and tells of
  /// those that are not.
  void finish(std::chrono::milliseconds patience);
  /// Leaves all groups whose engine supports it; ranks that wait for this one then fail at once.
  void close();

  /// Keeps a group's device engine until all are released together, when every rank is done (release_device_engines):
  /// no rank may free memory that another rank's device still reads.
  void keep(c10::intrusive_ptr<c10d::Backend> engine) { device_engines_.push_back(std::move(engine)); }
  void release_device_engines() { device_engines_.clear(); }

 private:
  const unsigned fork_generation_ = fork_generation();
  std::atomic<bool> open_{true};
  std::vector<c10::intrusive_ptr<c10d::Backend>> device_engines_;
  Mutex mutex_;
  std::vector<std::weak_ptr<Group::State>> groups_ LOCKSTEP_GUARDED_BY(mutex_);
  std::unique_ptr<GroupsWatch> watch_;  // last: its thread uses the others
};

struct Group::State {
  const int rank;
  const int world_size;
  const c10::intrusive_ptr<c10d::Store> store;  ///< undefined in a world of one
  const EngineFactories factories;
  const c10::intrusive_ptr<c10d::Backend> backend;
  const std::string backend_name;
  BlockingEngine* const blocking;  ///< the backend, if it is a BlockingEngine
  const std::shared_ptr<Membership> membership;
  c10::intrusive_ptr<c10d::Backend>
      device_backend;                             ///< undefined before the first tensor on a device (device_engine.h)
  uint64_t sequence = 0;                          ///< operations started so far; the same on all ranks
  int subgroups = 0;                              ///< subgroups made so far; the same on all ranks
  int replicas = 0;                               ///< replicas attached so far; the same on all ranks
  std::shared_ptr<void> statistics = nullptr;     ///< shared by this group's synchronised batch norms (src/nn)
  const unsigned generation = fork_generation();  ///< of the process that made the group
  CurrentCaller caller = {};
  std::shared_ptr<VirtualRanks> virtual_ranks = nullptr;  ///< of the group of all ranks; null: the run has none
  PageGroup on_page = {};
  MessageCounts messages = {};
  DeviceCalls device_calls = {};
  DeviceWorks device_works = {};
  uint64_t device_call = 0;  ///< the number of the operation that is being started; 0: it is none of device_calls
  std::vector<int> ranks_of_all = {};    ///< its ranks among all ranks; empty: all of them
  std::atomic<bool> has_thrown = false;  ///< an operation's failure has been thrown on this rank

  /// Every call of the group holds this guard. Throws Error once this rank has left.
  CallGuard enter(const char* operation) {
    if (!membership->is_open()) check_member(operation);
    if (device_works.has_failed()) throw_device_failure();
    return CallGuard(caller, rank, generation, operation);
  }
  void check_member(const char* operation) const;
  [[noreturn]] void throw_device_failure();
  /// As BlockingEngine::compares_all_calls().
  bool compares_all_calls() const { return blocking != nullptr && blocking->compares_all_calls(); }
  /// A rank's number among all ranks.
  int number_of_all(int of) const { return ranks_of_all.empty() ? of : ranks_of_all[static_cast<size_t>(of)]; }
};

/// Makes the group of `world_size` ranks over the factories' backends, or over the single engine if there is one rank.
/// `membership` is the parent group's.
Group make_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size, EngineFactories factories,
                 PageGroup on_page = {}, std::shared_ptr<Membership> membership = std::make_shared<Membership>());

Group make_group_over(c10::intrusive_ptr<c10d::Backend> engine, const c10::intrusive_ptr<c10d::Store>& store, int rank,
                      int world_size, EngineFactories factories, PageGroup on_page = {},
                      std::shared_ptr<Membership> membership = std::make_shared<Membership>());

/// Waits until this rank's collectives are done in all groups of its Context, for `patience` at most. Writes a warning
/// for those that failed or are not done, and that no thread waits for; none if `patience` is 0, as an exception ends
/// the work.
void finish_operations(const Group& group, std::chrono::milliseconds patience);
/// Whether there was such a warning in this process.
bool has_unfinished_operations();

/// Makes this rank leave the group. From now on is_open() is false, also for copies and subgroups. If the engine can
/// notify other ranks, those that wait for this one fail now.
void close(const Group& group);

Group::State& state_of(const Group& group);

}  // namespace lockstep
