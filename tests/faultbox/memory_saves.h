#pragma once

#include <memory>
#include <optional>
#include <random>

#include "checkpoint/memory/mapped_slots.h"
#include "checkpoint/memory/memory_slots.h"
#include "faultbox/injector.h"

namespace lockstep::faultbox {

/// All that a training of elastic_rank has.
struct ElasticState {
  int64_t step = 0;
  uint64_t parameter = 1;
};

uint64_t mix(uint64_t x);

/// How elastic_rank saves to the launcher's memory: by the protocol of the Checkpointer, slowly, and with a death
/// between any two of a save's writes if the driver wants one. The image is large, and every word in it follows from
/// the step: whatever is torn is noticed.
class MemorySaves {
 public:
  /// Writes of a save: the record becomes invalid, the range in pieces, the rank's own state, the record.
  static constexpr int kPieces = 8, kRecordWords = 8, kWrites = 1 + kPieces + 1 + kRecordWords;

  /// Under a launcher that holds memory.
  MemorySaves(Injector& injector, int rank, int ranks);

  /// All ranks call it while none saves, and before the first save: the newest that is whole. Throws if that is torn.
  std::optional<ElasticState> resume();
  /// All ranks call it for each step.
  void save(const ElasticState& state);

 private:
  /// Passes everything on, and dies.
  class MortalSlots;

  Injector& injector_;
  const int rank_, ranks_;
  const std::shared_ptr<MappedSlots> slots_;
  const std::shared_ptr<MortalSlots> mortal_;
  std::optional<SlotWriter> writer_;
};

}  // namespace lockstep::faultbox
