#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/file_descriptor.h"
#include "checkpoint/memory/slot_memory.h"

namespace lockstep {

/// The launcher's memory in the process of a rank. Records are mapped at once, data where the rank is going to write
/// them; what it reads, after a restart, is copied out. A child of fork() has none of it.
class MappedSlots final : public SlotMemory {
 public:
  /// `fd` is the inherited descriptor of StateMemory, which stays open; its number is not passed on any further.
  /// Throws Error.
  explicit MappedSlots(int fd);
  ~MappedSlots() override;

  uint64_t load(uint64_t offset) const override;
  void store(uint64_t offset, uint64_t word) override;
  /// Within a window, or through the descriptor, which is slower.
  void write(uint64_t offset, const void* data, uint64_t bytes) override;
  void read(uint64_t offset, void* to, uint64_t bytes) const override;

  /// Where this rank writes: its range and its own state, in both slots.
  enum Window { kCommon0, kCommon1, kOwn0, kOwn1, kWindows };
  /// Commits and maps [offset, offset + bytes) in place of what the window was. Throws LimitError with the bytes that
  /// are wanted and those that there are; then the window is gone, and what lay there stays.
  void open_window(Window window, uint64_t offset, uint64_t bytes);

  /// Bytes committed by all ranks together.
  uint64_t committed_bytes() const;

 private:
  struct Mapping {
    std::byte* data = nullptr;
    uint64_t offset = 0;
    size_t bytes = 0;
  };
  void unmap(Mapping& mapping);
  Mapping map(uint64_t offset, uint64_t bytes) const;
  std::byte* place_of(uint64_t offset, uint64_t bytes) const;
  void write_through(uint64_t offset, const char* data, uint64_t bytes) const;

  const int fd_;
  const unsigned fork_generation_;
  Mapping records_;
  std::array<Mapping, kWindows> windows_;
};

}  // namespace lockstep
