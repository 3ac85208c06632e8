#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/mutex.h"
#include "collectives/hierarchical/carrier.h"
#include "collectives/mpi/pump.h"

namespace lockstep::mpi_engine {

/// Tracks the ranks that no longer take part in a group. MPI itself does not report a rank that merely stops calling.
class Endings {
 public:
  Endings(std::shared_ptr<Pump> pump, c10::intrusive_ptr<c10d::Store> store, int rank, int world_size);

  /// Tells that this rank's operation has failed; all others fail, too.
  void fail() {
    pump_->keep_communicators();
    tell("failed");
  }
  /// Tells that this rank has done its part; a rank that waits for more from it fails.
  void leave() { tell("left"); }
  /// The reason why a message to or from `peer` will not arrive; empty while it may.
  std::string reason(int peer);

 private:
  void tell(const char* how);

  const std::shared_ptr<Pump> pump_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  Mutex mutex_;
  bool told_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  uint64_t seen_ LOCKSTEP_GUARDED_BY(mutex_) = 0;             ///< version of the board
  std::vector<std::string> how_ LOCKSTEP_GUARDED_BY(mutex_);  ///< each rank's ending
  int failed_ LOCKSTEP_GUARDED_BY(mutex_) = -1;
};

/// A communicator of a group's ranks.
class MpiCarrier final : public hierarchical_engine::Carrier {
 public:
  /// The engine's tags have 31 bits, and are folded if MPI's have fewer; in that case the program's tags are refused.
  enum class Tags { kEngines, kPrograms };

  /// `members`: the ranks' numbers in MPI.
  /// REQUIRES: all of them call it.
  MpiCarrier(std::shared_ptr<Pump> pump, std::shared_ptr<Endings> endings, const std::vector<int>& members, Tags tags,
             std::chrono::milliseconds timeout);

  c10::intrusive_ptr<c10d::Work> send(const at::Tensor& bytes, int to, int tag) override;
  c10::intrusive_ptr<c10d::Work> receive(const at::Tensor& bytes, int from, int tag) override;
  void break_off(int some_peer) override;
  void leave() override { endings_->leave(); }
  hierarchical_engine::Progress* progress() override { return pump_.get(); }

 private:
  c10::intrusive_ptr<c10d::Work> start(const at::Tensor& bytes, int peer, int tag, bool is_sent);

  const std::shared_ptr<Pump> pump_;
  const std::shared_ptr<Endings> endings_;
  const Tags tags_;
  const std::chrono::milliseconds timeout_;
  const Port::Handle communicator_;
};

}  // namespace lockstep::mpi_engine
