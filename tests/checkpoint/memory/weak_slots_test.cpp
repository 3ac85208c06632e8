#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>

#include "base/state_memory.h"
#include "checkpoint/memory/memory_slots.h"
#include "checkpoint/memory/record_word.h"
#include "collectives/shm/weak_executions.h"

// Checkpoints in memory, on memory that is as weak as ARM's or weaker (collectives/shm/weak_memory.h). Two ranks save;
// a third looks at any time and, as the model lets it, at stores that passed each other. What it sees is what is left
// if both ranks die at the moment that the last of these stores describes: one slot is whole, and holds what it says.

namespace lockstep {
namespace {

using shm::Dropped;
using What = shm::Dropped::What;

constexpr int kWriters = 2, kReader = 2;
constexpr uint64_t kWords = 9;  // of a record
constexpr uint64_t kCells = 4;  // of the common image, of 8 bytes each
constexpr int64_t kBefore = 2;  // saves that lie in the memory when ranks start
constexpr int64_t kSaves = 4;
constexpr int kLooks = 6;

uint64_t cell_of(int64_t step, uint64_t cell) { return static_cast<uint64_t>(step) * 1000 + cell; }
uint64_t own_of(int64_t step, int rank) { return cell_of(step, 500 + static_cast<uint64_t>(rank)); }

/// What ranks share. Data are stored word by word: they pass each other as a copy's do, and may be looked at meanwhile.
class SharedSlots final : public SlotMemory {
 public:
  uint64_t load(uint64_t offset) const override { return load_record_word(place_of(offset)); }
  void store(uint64_t offset, uint64_t word) override { store_record_word(place_of(offset), word); }
  void write(uint64_t offset, const void* data, uint64_t bytes) override {
    for (uint64_t i = 0; i < bytes / 8; ++i)
      record_word(place_of(offset + 8 * i)).store(static_cast<const uint64_t*>(data)[i], std::memory_order_relaxed);
  }
  void read(uint64_t offset, void* to, uint64_t bytes) const override {
    for (uint64_t i = 0; i < bytes / 8; ++i)
      static_cast<uint64_t*>(to)[i] = record_word(place_of(offset + 8 * i)).load(std::memory_order_relaxed);
  }

  void clear() { std::memset(static_cast<void*>(&memory_), 0, sizeof memory_); }
  std::byte* begin() { return reinterpret_cast<std::byte*>(&memory_); }
  static constexpr size_t bytes() { return sizeof(Memory); }

  static std::string name_of(size_t, size_t offset) {
    if (offset >= offsetof(Slot, common) && offset < sizeof(Slot)) return "data";
    if (offset >= sizeof(Slot)) return name_of(0, offset - sizeof(Slot));
    return "record";
  }

 private:
  struct Slot {
    uint64_t records[kWriters][kWords];
    uint64_t common[kCells], own[kWriters];
  };
  struct Memory {
    Slot slots[2];
  };

  std::byte* place_of(uint64_t offset) const {
    for (int slot = 0; slot < 2; ++slot) {
      Slot& here = memory_.slots[slot];
      const auto at = [&](uint64_t from, uint64_t* words, uint64_t count) {
        return offset >= from && offset < from + 8 * count ? reinterpret_cast<std::byte*>(words) + (offset - from)
                                                           : nullptr;
      };
      for (int rank = 0; rank < kWriters; ++rank) {
        if (auto* place = at(StateMemory::record_at(slot, rank), here.records[rank], kWords)) return place;
        if (auto* place = at(StateMemory::own_at(slot, rank), &here.own[rank], 1)) return place;
      }
      if (auto* place = at(StateMemory::common_at(slot), here.common, kCells)) return place;
    }
    std::abort();
  }

  alignas(64) mutable Memory memory_{};
};

void save(SlotWriter& writer, int rank, int64_t step) {
  writer.begin();
  constexpr uint64_t kMine = kCells / kWriters;
  for (uint64_t cell = kMine * static_cast<uint64_t>(rank); cell < kMine * static_cast<uint64_t>(rank + 1); ++cell) {
    const uint64_t word = cell_of(step, cell);
    writer.write_common(8 * cell, &word, 8);
  }
  const uint64_t own = own_of(step, rank);
  writer.write_own(0, &own, 8);
  writer.finish({.step = step, .owner = 7, .layout = 5, .common_bytes = 8 * kCells}, 8);
}

void write(SharedSlots& memory, int rank) {
  SlotWriter writer(memory, rank, kWriters, {.slot = 0, .sequence = kBefore + 1});
  auto& scheduler = *shm::Scheduler::active;
  for (int64_t step = kBefore + 1; step <= kBefore + kSaves; ++step) {
    for (uint64_t seen = scheduler.writes(); writer.unfinished_rank() >= 0; seen = scheduler.writes())
      scheduler.idle(seen);
    save(writer, rank, step);
  }
}

/// What was seen at one time.
class Seen final : public SlotMemory {
 public:
  explicit Seen(const SharedSlots& memory) {
    take_records(memory);
    for (int slot = 0; slot < 2; ++slot) {
      for (uint64_t cell = 0; cell < kCells; ++cell) take_data(memory, StateMemory::common_at(slot) + 8 * cell);
      for (int rank = 0; rank < kWriters; ++rank) take_data(memory, StateMemory::own_at(slot, rank));
    }
    const auto before = records_;
    std::atomic_thread_fence(std::memory_order_acquire);  // what data was seen is not newer than what comes now
    take_records(memory);
    at_one_time_ = records_ == before;
  }

  /// Whether the records stayed what they were while the data was read.
  bool at_one_time() const { return at_one_time_; }
  /// Empty, or what is wrong.
  std::string fault() const {
    const auto whole = whole_slots(*this);
    if (whole.empty()) return "no slot is whole";
    for (const WholeSlot& slot : whole) {
      for (uint64_t cell = 0; cell < kCells; ++cell)
        if (data_.at(StateMemory::common_at(slot.slot) + 8 * cell) != cell_of(slot.header.step, cell))
          return "a slot is called whole but has other data than its step";
      for (int rank = 0; rank < kWriters; ++rank)
        if (data_.at(StateMemory::own_at(slot.slot, rank)) != own_of(slot.header.step, rank))
          return "a slot is called whole but lacks what a rank had of its own";
    }
    return "";
  }

  uint64_t load(uint64_t offset) const override { return records_.at(offset); }
  void store(uint64_t, uint64_t) override { std::abort(); }
  void write(uint64_t, const void*, uint64_t) override { std::abort(); }
  void read(uint64_t, void*, uint64_t) const override { std::abort(); }

 private:
  void take_records(const SharedSlots& memory) {
    for (int slot = 0; slot < 2; ++slot)
      for (int rank = 0; rank < kWriters; ++rank)
        for (uint64_t word = 0; word < kWords; ++word) {
          const uint64_t offset = StateMemory::record_at(slot, rank) + 8 * word;
          records_[offset] = memory.load(offset);
        }
  }
  void take_data(const SharedSlots& memory, uint64_t offset) { memory.read(offset, &data_[offset], 8); }

  std::map<uint64_t, uint64_t> records_, data_;
  bool at_one_time_ = false;
};

struct Outcome : shm::WeakOutcome {
  uint64_t looks = 0;
};

Outcome explore(int executions, const Dropped& dropped) {
  SharedSlots slots;
  shm::WeakMemory memory(kWriters + 1, SharedSlots::name_of);
  memory.track(slots.begin(), SharedSlots::bytes());
  const auto start = [&] {
    slots.clear();
    for (int rank = 0; rank < kWriters; ++rank) {
      SlotWriter writer(slots, rank, kWriters, {.slot = 0, .sequence = 1});
      for (int64_t step = 1; step <= kBefore; ++step) save(writer, rank, step);
    }
  };
  uint64_t looks = 0;
  const auto body = [&](int rank, std::string& wrong) {
    if (rank != kReader) return write(slots, rank);
    for (int i = 0; i < kLooks; ++i) {
      const Seen seen(slots);
      if (!seen.at_one_time()) continue;
      ++looks;
      if (wrong.empty()) wrong = seen.fault();
    }
  };
  const auto outcome = shm::explore(memory, kWriters + 1, executions, dropped, start, body);
  return {outcome, looks};
}

TEST(WeakSlots, OneIsWholeAtAnyTime) {
  const int executions = std::getenv("LOCKSTEP_NIGHTLY") != nullptr ? 50'000 : 1000;
  const Outcome outcome = explore(executions, {});
  EXPECT_EQ(outcome.wrong, "") << "in the execution with seed " << outcome.executions - 1;
  EXPECT_GT(outcome.stale_loads, 0u);
  EXPECT_GT(outcome.looks, static_cast<uint64_t>(executions));
  std::printf("%d executions, %llu looks, %llu loads of overwritten values\n", outcome.executions,
              static_cast<unsigned long long>(outcome.looks), static_cast<unsigned long long>(outcome.stale_loads));
}

struct Omission {
  const char* name;
  Dropped dropped;
};

class WeakSlotsOmissions : public ::testing::TestWithParam<Omission> {};

TEST_P(WeakSlotsOmissions, AreFound) {
  const Outcome outcome = explore(4000, GetParam().dropped);
  EXPECT_NE(outcome.wrong, "") << "in " << outcome.executions << " executions";
  std::printf("found in execution %d: %s\n", outcome.executions, outcome.wrong.c_str());
}

INSTANTIATE_TEST_SUITE_P(Orders, WeakSlotsOmissions,
                         ::testing::Values(Omission{"RecordRelease", {"record", What::kRelease}},
                                           Omission{"RecordAcquire", {"record", What::kAcquire}},
                                           Omission{"FenceOfBegin", {"", What::kReleaseFences}}),
                         [](const auto& one) { return std::string(one.param.name); });

}  // namespace
}  // namespace lockstep
