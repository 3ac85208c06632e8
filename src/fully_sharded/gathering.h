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

/// Brings units together from the machines' parts, some ahead of the one in use.
///
/// There are slots of memory that a machine's ranks share, for the unit in use and those ahead, each as large as the
/// largest unit, whatever the number of units: a unit that was used gives its slot up. Units that stay gathered have a
/// slot each. Before a rank uses a unit it meets the others of its machine; then none of them still reads a unit
/// before, so others may come into those slots while this one computes. Which come next is what came next the last
/// time.
///
/// Every rank calls everything here in the same order (UseCheck), on the thread that trains; the engine's threads carry
/// out what is under way.
class Gathering {
 public:
  using What = UseCheck::What;
  Gathering(const MachineGroups& groups, std::deque<Unit>& units, UseCheck& check, const FullyShardedOptions& options);
  ~Gathering();
  Gathering(const Gathering&) = delete;
  Gathering& operator=(const Gathering&) = delete;

  /// The unit is open, until close() or the next use. `learn`: what comes next after what is remembered.
  void use(size_t unit, What what, bool learn);
  void close(size_t unit);
  /// The unit's memory, gathered now, for reading.
  const at::Tensor& read(size_t unit);
  /// The parts have changed: what was gathered is old.
  void forget();

  int64_t bytes() const;
  int64_t gathers() const { return gathers_; }
  int64_t bytes_sent() const { return bytes_sent_; }

 private:
  struct Slot {
    at::Tensor memory;             ///< bytes
    std::optional<size_t> unit{};  ///< that it holds, or that is under way to it
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
  /// The slot holds the unit, for all ranks of the machine.
  Slot& bring(size_t unit, What what);
  /// One that none of these units is in, nor the unit that was used last. REQUIRES: all ranks of the machine have left
  /// every other unit.
  Slot& free_slot(size_t for_unit, const std::vector<size_t>& needed);
  /// Those that come after this use are on their way.
  void start_next(const Use& use);

  const MachineGroups& groups_;
  std::deque<Unit>& units_;
  UseCheck& check_;
  const FullyShardedOptions options_;
  std::vector<Slot> slots_;     ///< of units that stay gathered, one for each, by its number
  const Slot* last_ = nullptr;  ///< of the unit that was used last
  std::optional<size_t> open_;
  std::optional<Use> learned_last_;
  std::map<Use, Use> learned_;
  int64_t gathers_ = 0, bytes_sent_ = 0;
};

}  // namespace lockstep::fully_sharded
