#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "collectives/shm/scheduler.h"

// Memory as a weak processor, or the C++ standard, allows it, under the real sources. They are compiled with
// -fsanitize=thread, whose calls (weak_memory_calls.cpp) come here: every access to memory, every atomic with its
// order.
//
//   - A load may return any value of a word that its rank does not know to be overwritten: stores to different words
//   pass
//     each other, unless an order forbids it. The scheduler's executions are the order of all seq_cst operations.
//   - Plain data is known to a rank when an acquire has read what a release stored, or a fence did the like. A read of
//     data that another rank writes, or a write of data that another reads or writes, without such a chain between
//     them, is a race: on a weak processor a stale read, or data overwritten too early. The first one is kept.
//
// So what holds here holds on ARM, which allows less. Not modelled: a relaxed load that returns a value from its own
// rank's future; no rank here stores what it has read by a relaxed load.
namespace lockstep::shm {

/// Orders that are left out on purpose, to see that they are missed.
struct Dropped {
  std::string word;  ///< a word's name as name_of() has it; empty: none
  enum class What {
    kNothing,
    kRelease,
    kAcquire,
    kSequential,
    kFences,
    kReleaseFences,
    kAcquireFences
  } what = What::kNothing;
};

class WeakMemory {
 public:
  /// Calls `name_of` with a segment's number and an offset.
  using Names = std::string (*)(size_t segment, size_t offset);
  WeakMemory(int ranks, Names name_of) : ranks_(ranks), name_of_(name_of) { active = this; }
  ~WeakMemory() { active = nullptr; }
  WeakMemory(const WeakMemory&) = delete;

  static inline WeakMemory* active = nullptr;

  void track(std::byte* begin, size_t bytes);
  /// Forgets what was read and written, and draws anew which value a load returns.
  void begin(unsigned seed, Dropped dropped);
  /// Empty, or the first two accesses between which no order was.
  const std::string& race() const { return race_; }
  /// Loads that returned an overwritten value.
  uint64_t stale_loads() const { return stale_loads_; }

  /// Whether the rank that runs accesses shared memory.
  bool tracks(const void* address) const {
    return Scheduler::active != nullptr && Scheduler::active->current() >= 0 && segment_of(address) >= 0;
  }

  void read(const void* address, size_t bytes) { plain(address, bytes, false); }
  void write(const void* address, size_t bytes) { plain(address, bytes, true); }
  /// `newest`: what memory holds, of a word that was not accessed before. Orders are the compiler's: 0 relaxed,
  /// 1 consume, 2 acquire, 3 release, 4 acq_rel, 5 seq_cst.
  uint64_t load(const void* word, uint64_t newest, int order);
  void store(const void* word, uint64_t newest, uint64_t value, int order);
  /// What it replaces is the newest value.
  void exchange(const void* word, uint64_t newest, uint64_t value, int order);
  void fence(int order);

 private:
  /// What is known: of each rank its plain accesses up to an epoch, of each word its stores up to a number.
  struct View {
    uint32_t epochs[kMostRanks] = {};
    std::vector<uint32_t> stores;
    void join(const View& other);
    uint32_t& of(size_t word);
  };
  struct Message {
    uint64_t value;
    View view;
  };
  struct Location {
    std::string name;
    size_t number;
    std::vector<Message> messages;
  };
  struct Rank {
    View now, released, acquirable;  ///< as of the last release fence; what relaxed loads have read
  };
  struct Segment {
    std::byte* begin;
    size_t bytes;
  };
  /// Of two bytes.
  struct Cell {
    uint32_t execution = 0, written = 0;
    int writer = -1;
    uint32_t read[kMostRanks] = {};
  };
  static constexpr size_t kCell = 2;

  int segment_of(const void* address) const {
    for (size_t i = 0; i < segments_.size(); ++i)
      if (address >= segments_[i].begin && address < segments_[i].begin + segments_[i].bytes)
        return static_cast<int>(i);
    return -1;
  }
  Location& location(const void* word, uint64_t newest);
  int weakened(const Location& location, int order, bool is_store) const;
  void plain(const void* address, size_t bytes, bool writes);
  void publish(Location& location, uint64_t value, int order, const Message* replaced);
  void acquire(const Message& message, int order);

  const int ranks_;
  const Names name_of_;
  std::vector<Segment> segments_;
  std::vector<std::vector<Cell>> cells_;
  std::map<const void*, Location> locations_;
  Rank of_[kMostRanks];
  View sequential_;  ///< words' stores that every later seq_cst operation knows
  std::mt19937 random_;
  Dropped dropped_;
  std::string race_;
  uint64_t stale_loads_ = 0;
  uint32_t execution_ = 0;
};

}  // namespace lockstep::shm
