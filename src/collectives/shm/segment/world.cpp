#include "collectives/shm/segment/world.h"

#include <unistd.h>

#include <bit>
#include <cstring>
#include <new>

#include "collectives/shm/segment/futex.h"
#include "rank_page/rank_board.h"

namespace lockstep::shm {

void initialize_segment(SharedSegment& segment, int rank, int world_size, const std::byte (&nonce)[16],
                        const Beginning& beginning) {
  auto* control = new (segment.data()) Control{};
  std::memcpy(control->nonce, nonce, sizeof nonce);
  control->version = kLayoutVersion;
  control->rank = static_cast<uint32_t>(rank);
  control->world_size = static_cast<uint32_t>(world_size);
  control->processor.store(kNoProcessor);
  control->finished.store(beginning.operations);
  for (Word* word : {&control->filled, &control->reduced, &control->drained}) word->store(beginning.rounds);
  for (int r = 0; r < world_size; ++r) {
    control->written[r].bytes.store(beginning.message_bytes);
    control->consumed[r].bytes.store(beginning.message_bytes);
  }
}

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
    bases_[r] = segment(r)->data();
    numbers_.add_launched(rank_of_process(r == rank_ ? ::getpid() : watches_[static_cast<size_t>(r)].pid()));
  }
}

void World::note_processor(uint32_t processor) const {
  std::atomic<uint32_t>& known = mine().processor;
  if (known.load(std::memory_order_relaxed) != processor) known.store(processor, std::memory_order_relaxed);
}

bool World::waits_on(uint32_t processor, uint64_t ranks) const {
  if (processor == kNoProcessor) return false;
  for (; ranks != 0; ranks &= ranks - 1)
    if (control(std::countr_zero(ranks)).processor.load(std::memory_order_relaxed) == processor) return true;
  return false;
}

void World::notify() const {
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    Control& peer = control(r);
    // After the caller's seq_cst store; pairs with the fence in Waiter::sleep().
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
