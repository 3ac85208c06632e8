#pragma once

#include <string>
#include <utility>

#include "checkpoint/format/byte_source.h"
#include "checkpoint/memory/slot_memory.h"

namespace lockstep {

/// A piece of the launcher's memory as a source for file readers.
/// REQUIRES: the memory outlives it.
class SlotSource : public ByteSource {
 public:
  SlotSource(std::string name, const SlotMemory& memory, uint64_t offset, uint64_t bytes)
      : ByteSource(std::move(name), bytes), memory_(memory), offset_(offset) {}

 private:
  void copy(uint64_t offset, char* to, uint64_t count) const override { memory_.read(offset_ + offset, to, count); }

  const SlotMemory& memory_;
  const uint64_t offset_;
};

}  // namespace lockstep
