#include "collectives/shm/kernels/take_over.h"

#include <algorithm>

#include "collectives/shm/kernels/write_lines.h"
#include "collectives/shm/segment/layout.h"

namespace lockstep::shm {
namespace {

/// Of all outputs together: fetched while earlier lines are summed. A processor cannot fetch much more at once.
constexpr size_t kFetchedAhead = size_t{2} << 10;

}  // namespace

void reduce_and_take_over(ReduceFunction kernel, const Reduction& reduction, int own, size_t element_bytes) {
  const size_t bytes = reduction.count * element_bytes;
  const auto others = static_cast<size_t>(std::max(1, reduction.output_count - 1));
  const size_t piece = std::max<size_t>(kFetchedAhead / others / kCacheLine, 4) * kCacheLine;
  const auto fetch = [&](size_t begin) {
    const size_t length = std::min(piece, bytes - begin);
    for (int o = 0; o < reduction.output_count; ++o)
      if (o != own) fetch_to_write(static_cast<std::byte*>(reduction.outputs[o]) + begin, length);
  };
  void* outputs[kMaxRanks];
  const void* inputs[kMaxRanks];
  if (bytes > 0) fetch(0);
  for (size_t at = 0; at < bytes; at += piece) {
    if (at + piece < bytes) fetch(at + piece);
    for (int i = 0; i < reduction.output_count; ++i) outputs[i] = static_cast<std::byte*>(reduction.outputs[i]) + at;
    for (int i = 0; i < reduction.input_count; ++i) inputs[i] = static_cast<const std::byte*>(reduction.inputs[i]) + at;
    kernel({outputs, reduction.output_count, inputs, reduction.input_count, std::min(piece, bytes - at) / element_bytes,
            reduction.factors});
  }
}

}  // namespace lockstep::shm
