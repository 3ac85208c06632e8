#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace lockstep {

// Access to a record's words shared between ranks, which orders all writes of a save (memory_slots.h).
// tests/checkpoint/memory/weak_slots_test.cpp runs the protocol over these on weak memory.

inline std::atomic_ref<uint64_t> record_word(std::byte* place) {
  return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(place));
}

/// Pairs with store_record_word(): a rank that loads a whole record sees all data written before it.
inline uint64_t load_record_word(std::byte* place) { return record_word(place).load(std::memory_order_acquire); }

/// Releases this rank's earlier writes to load_record_word() in another process.
inline void store_record_word(std::byte* place, uint64_t word) {
  record_word(place).store(word, std::memory_order_release);
}

}  // namespace lockstep
