#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/shared_segment.h"
#include "collectives/shm/segment/layout.h"
#include "collectives/shm/segment/peer_watch.h"
#include "collectives/shm/segment/rank_numbers.h"

namespace lockstep::shm {

/// Writes a new segment's control block.
void initialize_segment(SharedSegment& segment, int rank, int world_size, const std::byte (&nonce)[16],
                        const Beginning& beginning = {});

/// One rank's view of a group: the mapped segments of all ranks, and a watch over every other rank's process.
class World {
 public:
  /// segments[r] and watches[r] are rank r's; watches[rank] is empty. `spin`: the ranks fit on the processors that they
  /// may use, so a wait may spin for a moment before it sleeps.
  World(int rank, Geometry geometry, std::vector<std::shared_ptr<SharedSegment>> segments,
        std::vector<PeerWatch> watches, bool spin);

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool spin() const { return spin_; }
  uint64_t bit(int rank) const { return uint64_t{1} << rank; }
  /// All ranks but this one, as bits.
  uint64_t others() const { return others_; }
  const Geometry& geometry() const { return geometry_; }
  const PeerWatch& watch(int rank) const { return watches_[static_cast<size_t>(rank)]; }

  Control& control(int rank) const { return *reinterpret_cast<Control*>(base(rank)); }
  Control& mine() const { return control(rank_); }
  Line& line(int rank, uint64_t sequence) const { return control(rank).ring[sequence % kRingLines]; }
  Word& verdict() const { return control(0).verdict; }
  std::byte* eager(int rank) const { return base(rank) + geometry_.eager_at(); }
  std::byte* chunks(int rank, bool in_area) const {
    return base(rank) + (in_area ? geometry_.area_at() : geometry_.chunks_at());
  }
  std::byte* channel(int from, int to) const { return base(from) + geometry_.channel_at(to); }
  Box& box(int from, int to, uint64_t number) const {
    return *reinterpret_cast<Box*>(base(from) + geometry_.box_at(to, number));
  }
  std::byte* resident(int rank) const { return base(rank) + geometry_.resident_at(); }
  const std::shared_ptr<SharedSegment>& segment(int rank) const { return segments_[static_cast<size_t>(rank)]; }

  const RankNumbers& numbers() const { return numbers_; }
  /// See RankNumbers.
  void call_ranks(std::vector<int> names) { numbers_.call_ranks(std::move(names)); }

  /// Records the processor on which this rank waits.
  void note_processor(uint32_t processor) const;
  /// Whether one of these ranks was last seen waiting on this processor.
  bool waits_on(uint32_t processor, uint64_t ranks) const;

  /// Wakes the ranks that sleep for this one. Called after publishing a word (sequentially consistent).
  void notify() const;
  /// Wakes all ranks.
  void notify_all() const;

 private:
  std::byte* base(int rank) const { return bases_[rank]; }

  int rank_;
  int size_;
  bool spin_;
  uint64_t others_;
  Geometry geometry_;
  std::byte* bases_[kMaxRanks] = {};
  std::vector<std::shared_ptr<SharedSegment>> segments_;
  std::vector<PeerWatch> watches_;
  RankNumbers numbers_;
};

/// The place where a rank records the purpose of the operation with this number.
inline LabelNote& label_of(const World& world, int rank, uint64_t sequence) {
  return world.control(rank).labels[sequence % kRingLines];
}

}  // namespace lockstep::shm
