#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/file_descriptor.h"
#include "checkpoint/memory/slot_memory.h"

namespace lockstep {

/// The launcher's memory as mapped by a rank. Records are mapped at once, data when the rank is about to write it; data
/// read after a restart is copied out. A child of fork() has no mapping.
class MappedSlots final : public SlotMemory {
 public:
  /// `fd` is the inherited descriptor of StateMemory. It stays open, and is not inherited further. Throws Error.
  explicit MappedSlots(int fd);
  ~MappedSlots() override;

  uint64_t load(uint64_t offset) const override;
  void store(uint64_t offset, uint64_t word) override;
  /// Accesses a window or, more slowly, the descriptor.
  void write(uint64_t offset, const void* data, uint64_t bytes) override;
  void read(uint64_t offset, void* to, uint64_t bytes) const override;

  /// The areas that this rank writes: its range and its own state, in both slots.
  enum Window { kCommon0, kCommon1, kOwn0, kOwn1, kWindows };
  /// Commits and maps [offset, offset + bytes) as the window. Throws LimitError with the required and available bytes,
  /// leaving the window unmapped and its former contents unchanged.
  void open_window(Window window, uint64_t offset, uint64_t bytes);

  /// Maps [offset, offset + bytes) as the window without committing it.
  void open_sparse_window(Window window, uint64_t offset, uint64_t bytes);
  /// Commits a part of a sparse window. Throws as open_window(); then the window is unmapped.
  void commit_in(Window window, uint64_t offset, uint64_t bytes);
  /// Frees the whole pages in [offset, offset + bytes), whose contents become zeros.
  void release(uint64_t offset, uint64_t bytes) const;

  /// Bytes committed by all ranks together.
  uint64_t committed_bytes() const;

 private:
  struct Mapping {
    std::byte* data = nullptr;
    uint64_t offset = 0;
    size_t bytes = 0;
  };
  void unmap(Mapping& mapping);
  void commit(uint64_t begin, uint64_t end) const;
  Mapping map(uint64_t offset, uint64_t bytes) const;
  std::byte* place_of(uint64_t offset, uint64_t bytes) const;
  void write_through(uint64_t offset, const char* data, uint64_t bytes) const;

  const int fd_;
  const unsigned fork_generation_;
  Mapping records_;
  std::array<Mapping, kWindows> windows_;
};

}  // namespace lockstep
