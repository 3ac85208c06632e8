#pragma once

#include <deque>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <lockstep/fully_sharded_data_parallel.h>

#include "fully_sharded/machine_groups.h"
#include "fully_sharded/unit.h"
#include "fully_sharded/use_check.h"

namespace lockstep::fully_sharded {

/// Gathers units from the machines' parts, some ahead of the one in use.
///
/// The units in use and ahead have slots of memory that a machine's ranks share, each as large as the largest unit. The
/// number of slots does not depend on the number of units: after its use a unit releases its slot. Units that stay
/// gathered have a slot each. Before a rank uses a unit it meets the other ranks of its machine. After that none of
/// them reads an earlier unit, so those slots may be refilled while this rank computes. The next units are predicted
/// from the order of the last time.
///
/// REQUIRES: every rank calls all functions in the same order (UseCheck), on the training thread. The engine's threads
/// carry out the transfers.
class Gathering {
 public:
  using What = UseCheck::What;
  Gathering(const MachineGroups& groups, std::deque<Unit>& units, UseCheck& check, const FullyShardedOptions& options);
  ~Gathering();
  Gathering(const Gathering&) = delete;
  Gathering& operator=(const Gathering&) = delete;

  /// Opens the unit until close() or the next use. `learn`: remembers that it follows the previous unit.
  void use(size_t unit, What what, bool learn);
  void close(size_t unit);
  /// Gathers the unit's memory now, for reading.
  const at::Tensor& read(size_t unit);
  /// Called when the parts have changed, which invalidates gathered units.
  void forget();

  int64_t bytes() const;
  int64_t gathers() const { return gathers_; }
  int64_t bytes_sent() const { return bytes_sent_; }

 private:
  struct Slot {
    at::Tensor memory;             ///< bytes
    std::optional<size_t> unit{};  ///< that it holds, or that is being gathered into it
    struct UnderWay {
      Work rows;
      UseCheck::Sent word;
    };
    std::optional<UnderWay> under_way{};
  };
  using Use = std::pair<What, size_t>;

  Slot* slot_of(size_t unit);
  at::Tensor memory_of(const Slot& slot) const;
  void start(Slot& slot, size_t unit, What what);
  void finish(Slot& slot);
  /// Returns when the slot holds the unit, for all ranks of the machine.
  Slot& bring(size_t unit, What what);
  /// A slot that holds none of these units, nor the last one used.
  /// REQUIRES: all ranks of the machine have left every other unit.
  Slot& free_slot(size_t for_unit, const std::vector<size_t>& needed);
  /// Starts to gather the units that follow this use.
  void start_next(const Use& use);

  const MachineGroups& groups_;
  std::deque<Unit>& units_;
  UseCheck& check_;
  const FullyShardedOptions options_;
  std::vector<Slot> slots_;     ///< of units that stay gathered: one each, by unit number
  const Slot* last_ = nullptr;  ///< of the last unit used
  std::optional<size_t> open_;
  std::optional<Use> learned_last_;
  std::map<Use, Use> learned_;
  int64_t gathers_ = 0, bytes_sent_ = 0;
};

}  // namespace lockstep::fully_sharded
