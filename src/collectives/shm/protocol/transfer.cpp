#include "collectives/shm/protocol/transfer.h"

#include <algorithm>

#include "collectives/shm/kernels/stream_copy.h"

namespace lockstep::shm {
size_t Transfer::send_bytes(int to) const {
  if (request_.kind != OperationKind::kAllToAllUneven) return block_bytes_;
  return request_.pieces().send_counts[static_cast<size_t>(to)] * element_;
}

size_t Transfer::receive_bytes(int from) const {
  if (request_.kind != OperationKind::kAllToAllUneven) return block_bytes_;
  return request_.pieces().receive_counts[static_cast<size_t>(from)] * element_;
}

size_t Transfer::longest_bytes() const {
  size_t longest = 0;
  for (int r = 0; r < size_; ++r) longest = std::max({longest, send_bytes(r), receive_bytes(r)});
  return longest;
}

const void* Transfer::contiguous_input() const {
  if (request_.kind == OperationKind::kAllToAllUneven || (per_rank_ && !request_.pieces().inputs.empty()))
    return nullptr;
  return request_.input;
}

const std::byte* Transfer::input_block(int rank) const {
  if (!per_rank_) return static_cast<const std::byte*>(request_.input);
  const auto& blocks = request_.pieces().inputs;
  if (!blocks.empty()) return static_cast<const std::byte*>(blocks[static_cast<size_t>(rank)]);
  size_t offset = 0;
  if (request_.kind == OperationKind::kAllToAllUneven)
    for (int r = 0; r < rank; ++r) offset += send_bytes(r);
  else
    offset = block_bytes_ * static_cast<size_t>(rank);
  return static_cast<const std::byte*>(request_.input) + offset;
}

std::byte* Transfer::output_block(int rank) const {
  const auto& blocks = request_.pieces().outputs;
  if (!blocks.empty()) return static_cast<std::byte*>(blocks[static_cast<size_t>(rank)]);
  size_t offset = 0;
  if (request_.kind == OperationKind::kAllToAllUneven)
    for (int r = 0; r < rank; ++r) offset += receive_bytes(r);
  else
    offset = block_bytes_ * static_cast<size_t>(rank);
  return static_cast<std::byte*>(request_.output) + offset;
}

void Transfer::pack(std::byte* to, size_t stride, size_t begin, size_t end) const {
  if (!per_rank_) {
    plain_copy(to, input_block(rank_) + begin, end - begin);
    return;
  }
  for (int r = 0; r < size_; ++r) {
    const size_t last = std::min(end, send_bytes(r));
    if (r != rank_ && begin < last)
      plain_copy(to + static_cast<size_t>(r) * stride, input_block(r) + begin, last - begin);
  }
}

void Transfer::pack_for_slices(std::byte* to) const {
  const Range own = slice(rank_);
  plain_copy(to, input_block(rank_), own.begin);
  plain_copy(to + own.end, input_block(rank_) + own.end, block_bytes_ - own.end);
}

size_t Transfer::touched_bytes() const {
  const auto ranks = static_cast<size_t>(size_);
  switch (request_.kind) {
    case OperationKind::kBroadcast:
      return ranks * block_bytes_;
    case OperationKind::kScatter:
    case OperationKind::kGather:
      return 2 * ranks * block_bytes_;
    case OperationKind::kAllGather:
      return ranks * (1 + ranks) * block_bytes_;
    case OperationKind::kAllToAllUneven: {
      size_t mine = 0;
      for (int r = 0; r < size_; ++r) mine += send_bytes(r) + receive_bytes(r);
      return ranks * mine;
    }
    default:
      return 2 * ranks * ranks * block_bytes_;
  }
}

void Transfer::unpack(const std::byte* const* from, size_t begin, size_t end, ReduceFunction reduce,
                      const double* factors) const {
  auto* output = static_cast<std::byte*>(request_.output);
  if (is_reduction(request_.kind)) {
    if (!takes(rank_)) return;
    const void* inputs[kMaxRanks];
    for (int r = 0; r < size_; ++r) inputs[r] = r == rank_ ? input_block(rank_) + begin : from[r];
    void* outputs[] = {output + begin};
    reduce({outputs, 1, inputs, size_, (end - begin) / element_, factors});
    return;
  }
  const bool one_block = request_.kind == OperationKind::kBroadcast || request_.kind == OperationKind::kScatter;
  const CopyFunction move = result_copy(touched_bytes());
  for (int r = 0; r < size_; ++r) {
    const size_t last = std::min(end, receive_bytes(r));
    if (takes_from(rank_, r) && begin < last)
      move((one_block ? output : output_block(r)) + begin, from[r], last - begin);
  }
}

void Transfer::keep_own() const {
  switch (request_.kind) {
    case OperationKind::kBroadcast:
    case OperationKind::kScatter:
      if (rank_ == request_.root && request_.output != nullptr)
        plain_copy(static_cast<std::byte*>(request_.output), input_block(rank_), block_bytes_);
      return;
    case OperationKind::kGather:
      if (rank_ != request_.root) return;
      [[fallthrough]];
    case OperationKind::kAllGather:
    case OperationKind::kAllToAll:
    case OperationKind::kAllToAllUneven:
      if (input_block(rank_) != output_block(rank_))
        (leave_caches(touched_bytes()) ? stream_copy_from_memory : plain_copy)(output_block(rank_), input_block(rank_),
                                                                               receive_bytes(rank_));
      return;
    default:
      return;
  }
}

}  // namespace lockstep::shm
