#include "collectives/shm/protocol/announcer.h"

#include <algorithm>
#include <cstddef>

namespace lockstep::shm {
namespace {

constexpr size_t kResidentOneWay = size_t{4} << 20;

bool is_in_place(const Request& request) { return request.input == request.output; }

/// The line with the word is written last, at one go: the others poll it, and take it away in between.
void pack_into(Line& line, const Transfer& transfer) {
  constexpr size_t kInFirst = kCacheLine - offsetof(Line, data);
  const size_t bytes = transfer.block_bytes();
  if (transfer.has_block_per_rank() || bytes <= kInFirst) return transfer.pack(line.data, bytes, 0, bytes);
  transfer.pack(line.data + kInFirst, bytes, kInFirst, bytes);
  transfer.pack(line.data, bytes, 0, kInFirst);
}

}  // namespace

bool Announcer::announce(Operation& operation, uint64_t& blocked_on) {
  const uint64_t sequence = operation.sequence;
  Line& line = world_.line(world_.rank(), sequence);
  if (!operation.fits_inline()) {
    if (!place_package(operation, line, blocked_on)) return false;
  } else if (operation.transfer.gives(world_.rank())) {
    pack_into(line, operation.transfer);
  }
  line.header = operation.header.bits;
  // Releases line and package to Pipeline::arrive(); seq_cst for notify(), as every word that a rank may sleep for.
  line.word.store(Announcement::pack(sequence, sequence - finished_.own()), std::memory_order_seq_cst);
  operation.stage = Operation::Stage::kAnnounced;
  world_.notify();
  return true;
}

bool Announcer::is_resident(const Request& request, const Transfer& transfer) const {
  const bool all_reduce = request.kind == OperationKind::kAllReduce;
  const size_t bytes = transfer.package_bytes();
  const void* const input = transfer.contiguous_input();
  // One rank's data that does not fit into the caches moves faster through the chunks, with a core at either end.
  return transfer.gives(world_.rank()) && input != nullptr && (!all_reduce || is_in_place(request)) &&
         !(has_root(request.kind) && bytes > kResidentOneWay) && arena_.contains(input, bytes);
}

void Announcer::commit(size_t begin, size_t bytes, bool& is_done) {
  if (is_done) return;
  world_.segment(world_.rank())->commit_apart(begin, begin + bytes);
  is_done = true;
}

void Announcer::commit_for(const Request& request) {
  if (request.kind == OperationKind::kAllReduce || request.kind == OperationKind::kBarrier) return;
  if (cold_is_committed_ && area_is_committed_) return;
  const Geometry& geometry = world_.geometry();
  if (request.kind != OperationKind::kAllToAllUneven) {
    const Transfer transfer(request, world_.rank(), world_.size());
    const size_t bytes = transfer.package_bytes();
    if (bytes <= kInlineBytes || !transfer.gives(world_.rank()) || is_resident(request, transfer)) return;
    if (is_cold(request, bytes, false)) return commit(geometry.cold_at(), geometry.cold_bytes, cold_is_committed_);
    if (bytes <= limits_.eager(request.kind)) return;
  }
  commit(geometry.area_at(), geometry.area_bytes, area_is_committed_);
}

bool Announcer::place_package(Operation& operation, Line& line, uint64_t& blocked_on) {
  const Transfer& transfer = operation.transfer;
  const Request& request = operation.request;
  const int rank = world_.rank();
  const bool all_reduce = request.kind == OperationKind::kAllReduce;
  const bool uneven = request.kind == OperationKind::kAllToAllUneven;
  const size_t bytes = uneven ? 2 * sizeof(uint64_t) * static_cast<size_t>(world_.size())
                              : (transfer.gives(rank) ? transfer.package_bytes() : 0);
  const bool resident = is_resident(request, transfer), cold = is_cold(request, bytes, resident);
  size_t limit = all_reduce ? (resident ? limits_.one_shot : limits_.staged) : limits_.eager(request.kind);
  if (request.in_background && !all_reduce) limit = std::max(limit, limits_.background);
  const bool in_slices = all_reduce && bytes > limits_.private_one_shot;
  const bool stage = uneven || cold || (transfer.package_bytes() <= limit && bytes > 0);
  std::optional<size_t> at;
  if (stage) {
    at = allocate(cold ? cold_ : eager_, operation.sequence, bytes, in_slices, blocked_on);
    if (!at) return false;
    if (cold) *at += world_.geometry().cold_at() - world_.geometry().eager_at();
    std::byte* to = world_.eager(rank) + *at;
    if (uneven) {
      line.where.longest = transfer.longest_bytes();
      std::copy(request.pieces().send_counts.begin(), request.pieces().send_counts.end(),
                reinterpret_cast<uint64_t*>(to));
      std::copy(request.pieces().receive_counts.begin(), request.pieces().receive_counts.end(),
                reinterpret_cast<uint64_t*>(to) + world_.size());
    } else if (in_slices) {
      transfer.pack_for_slices(to);
    } else {
      transfer.pack(to, transfer.block_bytes(), 0, transfer.block_bytes());
    }
  }
  line.where.eager = at ? *at : kNowhere;
  line.where.resident = resident && !stage ? arena_.offset(transfer.contiguous_input()) : kNowhere;
  line.where.factor = request.factor;
  return true;
}

std::optional<size_t> Announcer::allocate(EagerRing& ring, uint64_t sequence, size_t bytes, bool until_here,
                                          uint64_t& blocked_on) {
  ring.release(finished_.least(), finished_.own());
  auto at = ring.allocate(sequence, bytes, until_here);
  if (!at && finished_.everyone(finished_.own(), blocked_on)) {  // what was known may be stale
    ring.release(finished_.least(), finished_.own());
    at = ring.allocate(sequence, bytes, until_here);
  }
  return at;
}

}  // namespace lockstep::shm
