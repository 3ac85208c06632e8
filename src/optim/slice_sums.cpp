#include "optim/slice_sums.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include <ATen/ATen.h>

namespace lockstep::detail {
namespace {

/// For two messages.
constexpr int64_t kStagingBytes = 16 << 20;

/// Sets [at, at + count) of `row` to zeros, or to elements of `from`, whose element `first` corresponds to `at`. A
/// model may have a thousand small parameters: on the CPU an operator's dispatch would take longer than the copy.
void clear(const at::Tensor& row, int64_t at, int64_t count) {
  if (count == 0) return;
  if (!row.is_cpu()) {
    row.narrow(0, at, count).zero_();
    return;
  }
  const auto element = static_cast<int64_t>(row.element_size());
  std::memset(static_cast<std::byte*>(row.mutable_data_ptr()) + at * element, 0, static_cast<size_t>(count * element));
}
void copy(const at::Tensor& row, int64_t at, int64_t count, const at::Tensor& from, int64_t first) {
  if (!row.is_cpu()) {
    row.narrow(0, at, count).copy_(from.narrow(0, first, count));
    return;
  }
  const auto element = static_cast<int64_t>(row.element_size());
  std::memcpy(static_cast<std::byte*>(row.mutable_data_ptr()) + at * element,
              static_cast<const std::byte*>(from.const_data_ptr()) + first * element,
              static_cast<size_t>(count * element));
}

}  // namespace

void SliceSums::bring(const GradientOf& gradient_of, ReduceOp op) {
  sums_.resize(areas_.areas().size());
  if (!staging_.defined()) {
    int64_t most = 0;
    for (const Areas::Area& area : areas_.areas())
      most = std::max(most, static_cast<int64_t>(area.parameters.nbytes()));
    if (areas_.areas().empty()) return;
    staging_ =
        at::empty({std::min(kStagingBytes, 2 * most)}, areas_.areas().front().parameters.options().dtype(at::kByte));
  }
  for (size_t area = 0; area < areas_.areas().size(); ++area) bring(area, gradient_of, op);
}

void SliceSums::bring(size_t index, const GradientOf& gradient_of, ReduceOp op) {
  const Areas::Area& area = areas_.areas()[index];
  if (!sums_[index].defined()) sums_[index] = areas_.own_zeros(area, area.dtype);
  const at::Tensor mine = areas_.own_slice(sums_[index], area);
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
    for (int rank = 0; rank < areas_.ranks(); ++rank) fill(rows[rank], index, rank * area.slice + begin, gradient_of);
    work = group_.reduce_scatter_async(mine.narrow(0, begin, count), rows, op);
  }
  for (auto& work : under_way)
    if (work) work->wait();
}

void SliceSums::fill(const at::Tensor& row, size_t area, int64_t begin, const GradientOf& gradient_of) const {
  int64_t done = 0;
  for (const Areas::Parameter& parameter : areas_.parameters()) {
    if (parameter.area != area) continue;
    if (parameter.offset >= begin + row.numel()) break;
    const int64_t from = std::max<int64_t>(parameter.offset - begin, done),
                  end = std::min(parameter.offset + parameter.tensor.numel() - begin, row.numel());
    const at::Tensor* const gradient = from < end ? gradient_of(parameter) : nullptr;
    if (gradient == nullptr) continue;
    clear(row, done, from - done);
    copy(row, from, end - from, *gradient, begin + from - parameter.offset);
    done = end;
  }
  clear(row, done, row.numel() - done);
}

void SliceSums::multiply(double factor) {
  for (size_t area = 0; area < sums_.size(); ++area) areas_.own_slice(sums_[area], areas_.areas()[area]).mul_(factor);
}

std::byte* SliceSums::place_of(const Areas::Parameter& parameter) const {
  return static_cast<std::byte*>(sums_[parameter.area].mutable_data_ptr()) +
         static_cast<size_t>(parameter.offset) * parameter.tensor.itemsize();
}

}  // namespace lockstep::detail
