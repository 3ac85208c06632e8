#include "collectives/shm/protocol/cells.h"

#include <algorithm>

namespace lockstep::shm {
namespace {

/// More is not in flight to a rank: it waits for the receiver.
constexpr size_t kInFlight = size_t{128} << 10;
/// So many cells of 16 KiB, which a rank has read and keeps, are still in its second-level cache when it writes to
/// them.
constexpr size_t kKept = 16;

}  // namespace

size_t Cells::most_kept(size_t cells) { return std::min(cells / 8, kKept); }

size_t Cells::most_in_flight(const Geometry& geometry) {
  // Of a rank's own cells, as many may be in flight to the other rank, and on their way back in its answers, which this
  // rank need not have read; the first and the last one in part. The other rank may keep most_kept().
  const size_t cells = geometry.channel_bytes / geometry.cell_bytes;
  const size_t blocks = std::min<size_t>((cells - most_kept(cells) - 2) / 2, StreamEnd::kBlocks - 2);
  return std::min(kInFlight, blocks * geometry.cell_bytes);
}

Cells::Cells(const World& world, int other)
    : world_(world),
      other_(other),
      bytes_(world.geometry().cell_bytes),
      cells_(world.geometry().channel_bytes / bytes_),
      most_kept_(most_kept(cells_)),
      mine_are_(world.rank() > other ? 1 : 0),
      mine_(world.channel(world.rank(), other)),
      others_(world.channel(other, world.rank())),
      kept_(most_kept_ + 1),
      unused_(cells_) {}

void Cells::commit() {
  if (committed_) return;
  const size_t begin = world_.geometry().channel_at(other_);
  world_.segment(world_.rank())->commit_apart(begin, begin + world_.geometry().channel_bytes);
  committed_ = true;
}

Cells::Cell Cells::take() {
  if (kept_.size() > 0) return kept_.pop_back();
  if (never_used_ < cells_) return static_cast<Cell>(mine_are_ * kMost + never_used_++);
  return unused_.pop_front();
}

Cells::Cell Cells::keep(Cell cell) {
  kept_.push_back(cell);
  if (kept_.size() <= most_kept_) return kNoCell;
  const Cell oldest = kept_.pop_front();
  if (!is_mine(oldest)) return oldest;
  unused_.push_back(oldest);
  return kNoCell;
}

}  // namespace lockstep::shm
