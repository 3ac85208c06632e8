#pragma once

#include <cstdint>
#include <string>

#include "base/file_descriptor.h"

namespace lockstep {

/// Memory in which a launcher keeps the state of its ranks, so that the state outlives them. It has no name. Its size
/// is a sealed range of addresses, which ranks commit as they need it.
///
///   records         2 slots of kMaxRanks records of kRecordBytes
///   place           where on disk the states belong, for a launcher whose ranks do not start again
///   slot 0, slot 1  the state common to all ranks, then each rank's own state
///
/// checkpoint/memory/memory_slots.h defines the contents.
struct StateMemory {
  static constexpr int kMaxRanks = 4096;
  static constexpr uint64_t kRecordBytes = 128;
  static constexpr uint64_t kRecordsBytes = uint64_t{2} * kMaxRanks * kRecordBytes;
  static constexpr uint64_t kPlaceBytes = 8192;
  static constexpr uint64_t kCommonBytes = uint64_t{1} << 46;
  static constexpr uint64_t kOwnBytes = uint64_t{1} << 34;
  static constexpr uint64_t kSlotBytes = kCommonBytes + kMaxRanks * kOwnBytes;
  static constexpr uint64_t kBytes = kRecordsBytes + kPlaceBytes + 2 * kSlotBytes;

  static constexpr uint64_t record_at(int slot, int rank) {
    return static_cast<uint64_t>(slot * kMaxRanks + rank) * kRecordBytes;
  }
  static constexpr uint64_t place_at() { return kRecordsBytes; }
  static constexpr uint64_t common_at(int slot) {
    return kRecordsBytes + kPlaceBytes + static_cast<uint64_t>(slot) * kSlotBytes;
  }
  static constexpr uint64_t own_at(int slot, int rank) {
    return common_at(slot) + kCommonBytes + static_cast<uint64_t>(rank) * kOwnBytes;
  }

  /// No descriptor if the system refuses it, for example because of a limit on file sizes (ulimit -f).
  static FileDescriptor make();
  /// Whether a descriptor came from make(): its number may have been reused on its way to a rank.
  static bool is(int fd);
};

}  // namespace lockstep
