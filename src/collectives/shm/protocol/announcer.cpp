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

bool Announcer::place_package(Operation& operation, Line& line, uint64_t& blocked_on) {
  const Transfer& transfer = operation.transfer;
  const Request& request = operation.request;
  const int rank = world_.rank();
  const bool all_reduce = request.kind == OperationKind::kAllReduce;
  const bool uneven = request.kind == OperationKind::kAllToAllUneven;
  size_t bytes = uneven ? 2 * sizeof(uint64_t) * static_cast<size_t>(world_.size())
                        : (transfer.gives(rank) ? transfer.package_bytes() : 0);
  const void* input = transfer.contiguous_input();
  // One rank's data that does not fit into the caches moves faster through the chunks, with a core at either end.
  const bool one_way = has_root(request.kind) && bytes > kResidentOneWay;
  const bool resident = transfer.gives(rank) && input != nullptr && (!all_reduce || is_in_place(request)) && !one_way &&
                        arena_.contains(input, bytes);
  size_t limit = all_reduce ? (resident ? limits_.one_shot : limits_.staged) : limits_.eager(request.kind);
  if (request.in_background && !all_reduce) limit = std::max(limit, limits_.background);
  const bool in_slices = all_reduce && bytes > limits_.private_one_shot;
  const bool stage = uneven || (transfer.package_bytes() <= limit && bytes > 0);
  std::optional<size_t> at;
  if (stage) {
    at = allocate_eager(operation.sequence, bytes, in_slices, blocked_on);
    if (!at) return false;
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
  line.where.resident = resident && !stage ? arena_.offset(input) : kNowhere;
  line.where.factor = request.factor;
  return true;
}

std::optional<size_t> Announcer::allocate_eager(uint64_t sequence, size_t bytes, bool until_here,
                                                uint64_t& blocked_on) {
  eager_.release(finished_.least(), finished_.own());
  auto at = eager_.allocate(sequence, bytes, until_here);
  if (!at && finished_.everyone(finished_.own(), blocked_on)) {  // what was known may be stale
    eager_.release(finished_.least(), finished_.own());
    at = eager_.allocate(sequence, bytes, until_here);
  }
  return at;
}

}  // namespace lockstep::shm
