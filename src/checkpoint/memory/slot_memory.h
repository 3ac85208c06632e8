#pragma once

#include <cstdint>

namespace lockstep {

/// The launcher's memory as seen by a rank. Positions are offsets in it (base/state_memory.h).
class SlotMemory {
 public:
  SlotMemory() = default;
  virtual ~SlotMemory() = default;
  SlotMemory(const SlotMemory&) = delete;
  SlotMemory& operator=(const SlotMemory&) = delete;

  /// A word of a record. A process that loads a stored word sees everything that its writer had stored and written
  /// before.
  virtual uint64_t load(uint64_t offset) const = 0;
  virtual void store(uint64_t offset, uint64_t word) = 0;
  /// The state itself.
  virtual void write(uint64_t offset, const void* data, uint64_t bytes) = 0;
  virtual void read(uint64_t offset, void* to, uint64_t bytes) const = 0;
};

}  // namespace lockstep
