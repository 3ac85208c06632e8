#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "collectives/shm/protocol/communicator.h"
#include "collectives/shm/scheduler.h"

// What the explorers run: one or two operations of two or three ranks, on the real sources.
namespace lockstep::shm {

/// So that data behind, beside and without a copy are all small.
inline constexpr size_t kOneShot = kInlineBytes + 128;
inline constexpr size_t kStaged = kOneShot + 64;
inline constexpr size_t kCold = kOneShot;

/// Memory for two groups, made once and cleared before each execution.
class Memory {
 public:
  Memory(int ranks, size_t chunk_bytes, size_t chunks) : ranks_(ranks) {
    geometry_.world_size = ranks;
    geometry_.eager_bytes = 4096;
    geometry_.chunk_bytes = chunk_bytes;
    geometry_.chunks = chunks;
    geometry_.area_bytes = chunks * chunk_bytes;
    geometry_.cold_bytes = Geometry::round_up(kInlineBytes + 4, kCacheLine);
    geometry_.channel_bytes = 8 * kCacheLine;  // of each cell that is kept, and of those that go back, there is one
    geometry_.cell_bytes = kCacheLine;
    geometry_.box_bytes = kCacheLine;
    geometry_.resident_bytes = 1 << 16;
    for (int r = 0; r < ranks_; ++r)
      segments_.push_back(std::make_shared<SharedSegment>("explorer", geometry_.segment_bytes(),
                                                          geometry_.resident_at(), geometry_.apart_bytes()));
  }
  const std::vector<std::shared_ptr<SharedSegment>>& segments() const { return segments_; }
  const Geometry& geometry() const { return geometry_; }
  std::unique_ptr<Communicator> fresh_group(int rank) {
    std::vector<PeerWatch> watches(static_cast<size_t>(ranks_));
    return std::make_unique<Communicator>(World(rank, geometry_, segments_, std::move(watches), true),
                                          std::make_shared<ProgressSet>(),
                                          Limits{.one_shot = kOneShot,
                                                 .private_one_shot = kOneShot,
                                                 .staged = kStaged,
                                                 .one_way = kOneShot,
                                                 .warm = kInlineBytes,
                                                 .cold = kCold,
                                                 .both_ways = kOneShot,
                                                 .background = kOneShot});
  }
  void wipe() {
    const std::byte nonce[16] = {};
    for (int r = 0; r < ranks_; ++r) {
      std::byte* const data = segments_[static_cast<size_t>(r)]->data();
      std::memset(data, 0xee, geometry_.resident_at());
      std::memset(data + geometry_.area_at(), 0xee, geometry_.apart_bytes());
      initialize_segment(*segments_[static_cast<size_t>(r)], r, ranks_, nonce);
    }
  }

 private:
  const int ranks_;
  Geometry geometry_;
  std::vector<std::shared_ptr<SharedSegment>> segments_;
};

enum class Kind {
  kInlineReduce,
  kEagerReduce,
  kInPlace,
  kStagedReduce,
  kBroadcast,
  kColdBroadcast,  ///< through memory that nobody caches, with room for one
  kBarrier,
  kMessage,
  kLongMessage,   ///< several times as long as its channel
  kManyMessages,  ///< more than there are boxes, the last but one too long for one
  kTwoRounds,     ///< all_reduce
  kThreeRounds,
  kBroadcastInRounds,
  kAllToAllInRounds,
  kNothing
};

inline constexpr size_t kChunk = 640;

/// One rank's buffers and what it expects of two operations.
struct RankState {
  std::unique_ptr<Communicator> group;
  std::vector<int32_t> values[2];
  std::vector<int32_t> output[2];  ///< where it is not the input
  std::vector<int32_t> seen[2];    ///< the results, as the rank read them at its end
  int32_t* data[2] = {};
  WorkPtr work[2];
};

inline constexpr int kMessages = static_cast<int>(kBoxes) + 7;
constexpr size_t elements_of_message(int number) { return number == kMessages - 2 ? 10 : 2; }

inline size_t elements(Kind kind) {
  switch (kind) {
    case Kind::kEagerReduce:
    case Kind::kColdBroadcast:
      return kInlineBytes / 4 + 1;
    case Kind::kInPlace:
      return kOneShot / 4 + 1;
    case Kind::kStagedReduce:
      return kOneShot / 4 + 3;
    case Kind::kTwoRounds:
      return 2 * kChunk / 4;
    case Kind::kThreeRounds:
    case Kind::kBroadcastInRounds:
      return 3 * kChunk / 4 - 7;
    case Kind::kAllToAllInRounds:
      return kChunk / 4 + 1;
    case Kind::kLongMessage:
      return 160;
    case Kind::kManyMessages: {
      size_t all = 0;
      for (int number = 0; number < kMessages; ++number) all += elements_of_message(number);
      return all;
    }
    case Kind::kNothing:
      return 0;
    default:
      return 2;
  }
}

class Scenario {
 public:
  Scenario(int ranks, Kind first, Kind second, int warm_up, size_t chunks = 2)
      : ranks_(ranks), kinds_{first, second}, warm_up_(warm_up), memory_(ranks, kChunk, chunks) {}

  int ranks() const { return ranks_; }
  const Memory& memory() const { return memory_; }

  void prepare() {
    memory_.wipe();
    for (int r = 0; r < ranks_; ++r) {
      RankState& state = states_[r];
      state.group = memory_.fresh_group(r);
      for (int i = 0; i < 2; ++i) {
        state.values[i].resize(buffer_elements(i));
        for (size_t k = 0; k < buffer_elements(i); ++k) state.values[i][k] = given(r, i, k);
        state.output[i].assign(buffer_elements(i), -1);
        state.data[i] = state.values[i].data();
        state.work[i] = nullptr;
        state.seen[i].clear();
        if (kinds_[i] != Kind::kInPlace) continue;
        state.data[i] = reinterpret_cast<int32_t*>(state.group->allocate(state.values[i].size() * 4));
        std::copy(state.values[i].begin(), state.values[i].end(), state.data[i]);
      }
    }
    // Uses up lines, so that the operations under test reuse them.
    for (int i = 0; i < warm_up_; ++i) {
      for (int r = 0; r < ranks_; ++r) states_[r].group->start({.kind = OperationKind::kBarrier});
      for (int r = 0; r < ranks_; ++r) states_[r].group->progress();
    }
  }

  void body(int rank) {
    RankState& state = states_[rank];
    for (int i = 0; i < 2; ++i)
      if (takes_part(i)) state.work[i] = start(rank, i);
    const auto done = [&](int i) { return !takes_part(i) || state.work[i]->done(); };
    for (;;) {
      const uint64_t since = Scheduler::active->writes();
      if (!done(0) || !done(1)) state.group->progress();
      if (done(0) && done(1)) return use_results(rank);
      Scheduler::active->idle(since);
    }
  }

  /// The same, but sleeping where there is nothing to do.
  void sleeping_body(int rank) {
    RankState& state = states_[rank];
    for (int i = 0; i < 2; ++i)
      if (takes_part(i)) state.work[i] = start(rank, i);
    for (int i = 0; i < 2; ++i)
      while (takes_part(i) && !state.work[i]->done()) state.group->poll(*state.work[i], std::chrono::milliseconds(10));
    use_results(rank);
  }

  /// Empty if everything that was done is right, and what was not done is rightly blamed on the dead rank.
  std::string verdict(const Scheduler& scheduler, int victim) {
    for (int r = 0; r < ranks_; ++r) {
      if (r == victim) continue;
      for (int i = 0; i < 2; ++i) {
        if (!takes_part(i)) continue;
        const auto& work = states_[r].work[i];
        if (work && work->failed()) return "failed: " + work->error();
        if (!work || !work->done()) {
          if (victim < 0) return "rank " + std::to_string(r) + " is stuck in operation " + std::to_string(i);
          if (!waits_for(r, victim)) return "stuck, and not for the dead";
          continue;
        }
        for (size_t k = 0; k < buffer_elements(i); ++k)
          if ((states_[r].seen[i].empty() ? result(r, i)[k] : states_[r].seen[i][k]) != expected(r, i, k))
            return "wrong result of operation " + std::to_string(i);
      }
      if (victim < 0 && !scheduler.finished(r)) return "not finished";
    }
    return "";
  }

  void clear() {
    for (auto& state : states_) state.group.reset();
  }

 private:
  /// Reads them and writes something else there, as a caller may as soon as its operations are done.
  void use_results(int rank) {
    RankState& state = states_[rank];
    for (int i = 0; i < 2; ++i) {
      if (!takes_part(i)) continue;
      int32_t* data = result(rank, i);
      state.seen[i].assign(data, data + buffer_elements(i));
      std::fill(data, data + buffer_elements(i), -7);
    }
  }
  bool takes_part(int i) const { return kinds_[i] != Kind::kNothing; }
  size_t buffer_elements(int i) const {
    return elements(kinds_[i]) * (kinds_[i] == Kind::kAllToAllInRounds ? static_cast<size_t>(ranks_) : 1);
  }
  /// At once, or when the rank finally waits for it.
  bool waits_for(int rank, int victim) const {
    uint64_t seen = 0, next = states_[rank].group->waiting_for();
    while (next != seen) {
      seen = next;
      if ((seen >> victim & 1) != 0) return true;
      for (int r = 0; r < ranks_; ++r)
        if ((seen >> r & 1) != 0) next |= states_[r].group->waiting_for();
    }
    return false;
  }
  int32_t* result(int rank, int i) {
    return kinds_[i] == Kind::kAllToAllInRounds ? states_[rank].output[i].data() : states_[rank].data[i];
  }
  /// Differs from element to element, so that a round in the wrong place is noticed.
  static int32_t given(int rank, int i, size_t k) { return 100 * (i + 1) + rank + 1000 * static_cast<int32_t>(k); }
  int32_t expected(int rank, int i, size_t k) const {
    const size_t count = elements(kinds_[i]);
    switch (kinds_[i]) {
      case Kind::kBarrier:
        return given(rank, i, k);
      case Kind::kBroadcast:
      case Kind::kColdBroadcast:
      case Kind::kBroadcastInRounds:
        return given(1, i, k);
      case Kind::kMessage:
      case Kind::kLongMessage:
      case Kind::kManyMessages:
        return given(0, i, k);
      case Kind::kAllToAllInRounds:
        return given(static_cast<int>(k / count), i, static_cast<size_t>(rank) * count + k % count);
      default:
        int32_t sum = 0;
        for (int r = 0; r < ranks_; ++r) sum += given(r, i, k);
        return sum;
    }
  }
  WorkPtr message(int rank, int32_t* data, size_t count) {
    Communicator& group = *states_[rank].group;
    return rank == 0 ? WorkPtr(group.send(data, count * 4, 1, 7)) : group.receive(data, count * 4, 0, 7);
  }
  WorkPtr start(int rank, int i) {
    RankState& state = states_[rank];
    const size_t count = elements(kinds_[i]);
    Request request{.kind = OperationKind::kAllReduce,
                    .type = DataType::kInt32,
                    .count = count,
                    .input = state.data[i],
                    .output = state.data[i]};
    if (kinds_[i] == Kind::kBarrier) return state.group->start({.kind = OperationKind::kBarrier});
    if (kinds_[i] == Kind::kMessage || kinds_[i] == Kind::kLongMessage) return message(rank, state.data[i], count);
    if (kinds_[i] == Kind::kManyMessages) {
      WorkPtr last;
      for (int number = 0, at = 0; number < kMessages; ++number) {
        last = message(rank, state.data[i] + at, elements_of_message(number));
        at += static_cast<int>(elements_of_message(number));
      }
      return last;
    }
    if (kinds_[i] == Kind::kBroadcast || kinds_[i] == Kind::kColdBroadcast || kinds_[i] == Kind::kBroadcastInRounds)
      request.kind = OperationKind::kBroadcast, request.root = 1;
    if (kinds_[i] == Kind::kAllToAllInRounds)
      request.kind = OperationKind::kAllToAll, request.output = state.output[i].data();
    return state.group->start(request);
  }

  const int ranks_;
  const Kind kinds_[2];
  const int warm_up_;
  Memory memory_;
  RankState states_[kMostRanks];
};

}  // namespace lockstep::shm
