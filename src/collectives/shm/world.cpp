#include "collectives/shm/world.h"

#include <unistd.h>

#include <bit>
#include <cstring>
#include <new>

#include "base/futex.h"
#include "base/rank_board.h"

namespace lockstep::shm {

World::World(int rank, Geometry geometry, std::vector<std::shared_ptr<SharedSegment>> segments,
             std::vector<PeerWatch> watches, bool spin)
    : rank_(rank),
      size_(static_cast<int>(segments.size())),
      spin_(spin),
      others_((size_ == kMaxRanks ? ~uint64_t{0} : (uint64_t{1} << size_) - 1) & ~(uint64_t{1} << rank)),
      geometry_(geometry),
      segments_(std::move(segments)),
      watches_(std::move(watches)) {
  for (int r = 0; r < size_; ++r) {
    bases_[r] = segment(r).data();
    launched_ranks_.push_back(rank_of_process(r == rank_ ? ::getpid() : watches_[static_cast<size_t>(r)].pid()));
  }
}

uint64_t World::launched_ranks(uint64_t ranks) const {
  uint64_t launched = 0;
  for (; ranks != 0; ranks &= ranks - 1)
    if (const int rank = launched_rank(std::countr_zero(ranks)); rank >= 0 && rank < 64)
      launched |= uint64_t{1} << rank;
  return launched;
}

void World::initialize(SharedSegment& segment, int rank, int world_size, const std::byte (&nonce)[16]) {
  auto* control = new (segment.data()) Control{};
  std::memcpy(control->nonce, nonce, sizeof nonce);
  control->version = kLayoutVersion;
  control->rank = static_cast<uint32_t>(rank);
  control->world_size = static_cast<uint32_t>(world_size);
  control->drained.store(uint64_t{1} << kRoundBits);  // operation 0 never was, and is finished
}

void World::notify() const {
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    Control& peer = control(r);
    if ((peer.awaited.load(std::memory_order_seq_cst) & bit(rank_)) == 0) continue;
    peer.awaited.store(0);
    peer.bell.fetch_add(1);
    futex_wake_all(peer.bell);
  }
}

void World::notify_all() const {
  for (int r = 0; r < size_; ++r) {
    control(r).bell.fetch_add(1);
    futex_wake_all(control(r).bell);
  }
}

}  // namespace lockstep::shm
