#pragma once

#include <cstddef>
#include <vector>

namespace lockstep::hosts {

/// One direction of a connection that is carried on.
struct Flow {
  static constexpr size_t kBufferBytes = 256 << 10;

  std::vector<char> buffer = std::vector<char>(kBufferBytes);
  size_t begin = 0, end = 0;
  bool source_ended = false, sink_ended = false;

  bool is_empty() const { return begin == end; }
  size_t size() const { return end - begin; }
  const char* data() const { return buffer.data() + begin; }
  void take(size_t bytes) {
    begin += bytes;
    if (begin == end) begin = end = 0;
  }
  bool has_to_end() const { return source_ended && is_empty() && !sink_ended; }
};

}  // namespace lockstep::hosts
