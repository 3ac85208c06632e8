#include "collectives/hierarchical/segment.h"

#include <algorithm>
#include <cstring>

#include "collectives/shm/kernels/element.h"

namespace lockstep::hierarchical_engine {
namespace {

using shm::OperationKind;

/// Buffers that the others cannot access are copied to memory of this size.
constexpr size_t kSegmentBytes = 32 << 20;

bool is_for_all(const shm::Request& request) { return request.kind == OperationKind::kAllReduce; }
bool is_scattered(const shm::Request& request) { return request.kind == OperationKind::kReduceScatter; }
size_t rows_of(const shm::Request& request, const Layout& layout) {
  return is_scattered(request) ? static_cast<size_t>(layout.world_size()) : 1;
}

}  // namespace

size_t Segment::most_elements(const Layout& layout, const shm::Request& request) {
  return std::max<size_t>(1, kSegmentBytes / (rows_of(request, layout) * shm::element_bytes(request.type)));
}

Segment::Segment(const Layout& layout, Machine& machine, const shm::Request& request, size_t begin, size_t count,
                 uint32_t tag, std::chrono::milliseconds timeout)
    : layout_(layout),
      machine_(machine),
      request_(request),
      begin_(begin),
      count_(count),
      element_(shm::element_bytes(request.type)) {
  lay_out_inputs();
  cards_ = machine_.meet({tag, machine_.place_of(mine_), stride_, 0}, timeout);
}

void Segment::lay_out_inputs() {
  const size_t rows = rows_of(request_, layout_);
  const auto& blocks = request_.pieces().inputs;
  auto* data = static_cast<std::byte*>(is_for_all(request_) ? request_.output : const_cast<void*>(request_.input));
  if (blocks.empty() && machine_.reaches(data, rows * request_.count * element_)) {
    mine_ = data + begin_ * element_;
    stride_ = request_.count * element_;
    return;
  }
  stride_ = count_ * element_;
  mine_ = machine_.stage(rows * stride_);
  for (size_t row = 0; row < rows; ++row) {
    const std::byte* block =
        blocks.empty() ? data + row * request_.count * element_ : static_cast<const std::byte*>(blocks[row]);
    std::memcpy(mine_ + row * stride_, block + begin_ * element_, stride_);
  }
}

void Segment::take_result() const {
  const bool is_mine =
      is_for_all(request_) || (request_.kind == OperationKind::kReduce && request_.root == layout_.rank);
  auto* target = static_cast<std::byte*>(request_.output) + begin_ * element_;
  if (is_mine && target != mine_) std::memcpy(target, mine_, count_ * element_);
}

std::byte* Segment::place(int local, const Piece& piece) const {
  const Card& card = cards_[static_cast<size_t>(local)];
  return machine_.at(local, card.place) + static_cast<size_t>(piece.row) * card.stride + piece.begin * element_;
}

std::vector<void*> Segment::targets(const Piece& piece) const {
  if (is_scattered(request_)) return {static_cast<std::byte*>(request_.output) + (begin_ + piece.begin) * element_};
  if (!is_for_all(request_)) return {place(layout_.local_of[static_cast<size_t>(request_.root)], piece)};
  std::vector<void*> all{place(layout_.local(), piece)};
  for (int local = 0; local < machine_.size(); ++local)
    if (local != layout_.local()) all.push_back(place(local, piece));
  return all;
}

}  // namespace lockstep::hierarchical_engine
