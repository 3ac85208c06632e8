#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace lockstep {

// How a word of a record is read and written where ranks share it, and with it the order of all that a save writes
// (memory_slots.h). tests/checkpoint/memory/weak_slots_test.cpp runs the protocol over these on weak memory.

inline std::atomic_ref<uint64_t> record_word(std::byte* place) {
  return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(place));
}

/// From store_record_word(): who loads a whole record sees the data that were written before it.
inline uint64_t load_record_word(std::byte* place) { return record_word(place).load(std::memory_order_acquire); }

/// Releases what this rank wrote before, to load_record_word() in another process.
inline void store_record_word(std::byte* place, uint64_t word) {
  record_word(place).store(word, std::memory_order_release);
}

}  // namespace lockstep
