#pragma once

#include <cstdint>

#include "collectives/shm/kernels/element.h"

namespace lockstep::shm {

/// The header of a message, as it travels.
struct Envelope {
  int64_t tag = 0;
  uint64_t bytes_and_type = 0;

  Envelope() = default;
  Envelope(int64_t tag_, uint64_t bytes, DataType type)
      : tag(tag_), bytes_and_type(bytes << 8 | static_cast<uint64_t>(type)) {}
  uint64_t bytes() const { return bytes_and_type >> 8; }
  DataType type() const { return static_cast<DataType>(bytes_and_type & 255); }
  bool operator==(const Envelope&) const = default;
};

}  // namespace lockstep::shm
