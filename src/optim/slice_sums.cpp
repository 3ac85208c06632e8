#include "optim/slice_sums.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include <ATen/ATen.h>

#include "checkpoint/sliced_memory.h"

namespace lockstep::detail {
namespace {

/// Of two messages.
constexpr int64_t kStagingBytes = 16 << 20;

}  // namespace

void SliceSums::bring(const PlaceOf& place_of, ReduceOp op) {
  sums_.resize(areas_.areas().size());
  if (!staging_.defined()) {
    int64_t most = 0;
    for (const Areas::Area& area : areas_.areas())
      most = std::max(most, static_cast<int64_t>(area.parameters.nbytes()));
    staging_ = at::empty({std::min(kStagingBytes, 2 * most)}, at::kByte);
  }
  for (size_t area = 0; area < areas_.areas().size(); ++area) bring(area, place_of, op);
}

void SliceSums::bring(size_t index, const PlaceOf& place_of, ReduceOp op) {
  const Areas::Area& area = areas_.areas()[index];
  if (!sums_[index].defined()) sums_[index] = sliced_zeros(area.slice, area.dtype, areas_.ranks(), areas_.rank());
  const at::Tensor mine = sums_[index].narrow(0, areas_.rank() * area.slice, area.slice);
  const at::Tensor staging = staging_.view(area.dtype);
  const int64_t most =
      std::max(Areas::kAligned, staging.numel() / 2 / areas_.ranks() / Areas::kAligned * Areas::kAligned);
  std::array<std::optional<Work>, 2> under_way;
  for (int64_t begin = 0, turn = 0; begin < area.slice; begin += most, turn ^= 1) {
    const int64_t count = std::min(most, area.slice - begin);
    auto& work = under_way[static_cast<size_t>(turn)];
    if (work) work->wait();
    const at::Tensor rows =
        staging.narrow(0, turn * most * areas_.ranks(), count * areas_.ranks()).view({areas_.ranks(), count});
    for (int rank = 0; rank < areas_.ranks(); ++rank) fill(rows[rank], index, rank * area.slice + begin, place_of);
    work = group_.reduce_scatter_async(mine.narrow(0, begin, count), rows, op);
  }
  for (auto& work : under_way)
    if (work) work->wait();
}

void SliceSums::fill(const at::Tensor& row, size_t area, int64_t begin, const PlaceOf& place_of) const {
  const auto element = static_cast<int64_t>(row.element_size());
  auto* const to = static_cast<std::byte*>(row.mutable_data_ptr());
  int64_t done = 0;
  for (const Areas::Parameter& parameter : areas_.parameters()) {
    if (parameter.area != area) continue;
    if (parameter.offset >= begin + row.numel()) break;
    const int64_t from = std::max<int64_t>(parameter.offset - begin, done),
                  end = std::min(parameter.offset + parameter.tensor.numel() - begin, row.numel());
    const std::byte* const gradient = from < end ? place_of(parameter) : nullptr;
    if (gradient == nullptr) continue;
    std::memset(to + done * element, 0, static_cast<size_t>((from - done) * element));
    std::memcpy(to + from * element, gradient + (begin + from - parameter.offset) * element,
                static_cast<size_t>((end - from) * element));
    done = end;
  }
  std::memset(to + done * element, 0, static_cast<size_t>((row.numel() - done) * element));
}

std::byte* SliceSums::place_of(const Areas::Parameter& parameter) const {
  return static_cast<std::byte*>(sums_[parameter.area].mutable_data_ptr()) +
         static_cast<size_t>(parameter.offset) * parameter.tensor.itemsize();
}

}  // namespace lockstep::detail
