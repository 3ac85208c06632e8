#include "checkpoint/memory/memory_slots.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/state_memory.h"
#include "checkpoint/memory/mapped_slots.h"

// Every order of the ranks' writes, and a death of all ranks after each, on the real code.
//
// What a rank writes depends on nothing but its number and the slot it begins with; what others wrote only decides
// whether it may go on. So its writes are recorded once, and what lies in the memory follows from how many of them each
// rank has made: those numbers are the states, and all that can be reached are visited. In each of them a machine full
// of dead ranks must have left one whole state; ranks that start again save in it, and die in turn.
//
// Ranks that die one after the other reach no other states than these: a rank that is dead is one that stays behind.
namespace lockstep {
namespace {

constexpr uint64_t kOwner = 77;
constexpr uint64_t kCells = 6;  // of the common image, of 8 bytes each

/// Memory of 8-byte cells; those that were never written are 0.
class Image : public SlotMemory {
 public:
  Image() = default;
  explicit Image(std::map<uint64_t, uint64_t> from) : cells(std::move(from)) {}

  uint64_t load(uint64_t offset) const override {
    const auto found = cells.find(offset);
    return found == cells.end() ? 0 : found->second;
  }
  void store(uint64_t offset, uint64_t word) override { cells[offset] = word; }
  void write(uint64_t offset, const void* data, uint64_t bytes) override {
    const auto* words = static_cast<const uint64_t*>(data);
    for (uint64_t i = 0; i < bytes / 8; ++i) cells[offset + 8 * i] = words[i];
  }
  void read(uint64_t offset, void* to, uint64_t bytes) const override {
    auto* words = static_cast<uint64_t*>(to);
    for (uint64_t i = 0; i < bytes / 8; ++i) words[i] = load(offset + 8 * i);
  }

  std::map<uint64_t, uint64_t> cells;
};

uint64_t common_cell(int64_t step, uint64_t cell) { return static_cast<uint64_t>(step) * 1000 + cell; }
uint64_t own_cell(int64_t step, int rank) {
  return static_cast<uint64_t>(step) * 1000 + 500 + static_cast<uint64_t>(rank);
}

enum class Variant { kAsItIs, kRecordBeforeData, kSlotStaysWhole, kNobodyWaits };

/// What one rank does from its start on.
class Program : public SlotMemory {
 public:
  struct Event {
    int wait = -1;  ///< >= 0: goes on when waits_[wait] says so; it writes nothing
    uint64_t offset = 0, word = 0;
    int64_t begins = 0, ends = 0;  ///< the step whose save begins or ends with it
  };

  Program(int rank, int world_size, SlotTurn turn, int64_t first_step, int saves, Variant variant) {
    SlotWriter writer(*this, rank, world_size, turn);
    const uint64_t r = static_cast<uint64_t>(rank), n = static_cast<uint64_t>(world_size);
    const uint64_t begin = kCells * r / n, end = kCells * (r + 1) / n;
    for (int64_t step = first_step; step < first_step + saves; ++step) {
      if (variant != Variant::kNobodyWaits) {
        events_.push_back({.wait = static_cast<int>(waits_.size())});
        waits_.push_back(writer);
      }
      const size_t before = events_.size();
      writer.begin();
      if (variant == Variant::kSlotStaysWhole) events_.pop_back();
      const size_t data = events_.size();
      for (uint64_t cell = begin; cell < end; ++cell) {
        const uint64_t word = common_cell(step, cell);
        writer.write_common(8 * cell, &word, 8);
      }
      const uint64_t own = own_cell(step, rank);
      writer.write_own(0, &own, 8);
      const size_t record = events_.size();
      writer.finish({.step = step, .owner = kOwner, .layout = 5, .common_bytes = 8 * kCells}, 8);
      if (variant == Variant::kRecordBeforeData)
        std::rotate(events_.begin() + static_cast<ptrdiff_t>(data), events_.begin() + static_cast<ptrdiff_t>(record),
                    events_.end());
      events_[before].begins = step;
      events_.back().ends = step;
    }
  }

  const std::vector<Event>& events() const { return events_; }
  bool may_pass(int wait, const SlotMemory& image) const {
    seen_ = &image;
    return waits_[static_cast<size_t>(wait)].unfinished_rank() < 0;
  }

 private:
  uint64_t load(uint64_t offset) const override { return seen_->load(offset); }
  void store(uint64_t offset, uint64_t word) override { events_.push_back({.offset = offset, .word = word}); }
  void write(uint64_t offset, const void* data, uint64_t bytes) override {
    for (uint64_t i = 0; i < bytes / 8; ++i) store(offset + 8 * i, static_cast<const uint64_t*>(data)[i]);
  }
  void read(uint64_t, void*, uint64_t) const override { FAIL() << "a save reads no data"; }

  std::vector<Event> events_;
  std::vector<SlotWriter> waits_;
  mutable const SlotMemory* seen_ = nullptr;
};

/// All states of one start of `world_size` ranks.
class Explorer {
 public:
  Explorer(const Image& from, int world_size, int saves, Variant variant)
      : image_(from.cells), position_(static_cast<size_t>(world_size)) {
    const auto before = whole_slots(from);
    base_step_ = before.empty() ? 0 : before.front().header.step;
    const SlotTurn turn = first_turn(from);
    for (int rank = 0; rank < world_size; ++rank)
      programs_.push_back(std::make_unique<Program>(rank, world_size, turn, base_step_ + 1, saves, variant));
    begun_.assign(static_cast<size_t>(world_size), base_step_);
    ended_ = begun_;
  }

  /// Calls `visit` with the memory of each state; returns how many there are.
  size_t run(const std::function<void(const Image&)>& visit) {
    visit_ = &visit;
    explore();
    return visited_.size();
  }
  /// In words, of the first state that is wrong; empty: none is.
  const std::string& fault() const { return fault_; }
  bool came_to_the_end() const { return end_; }

 private:
  void explore() {
    if (!visited_.insert(position_).second) return;
    check();
    (*visit_)(image_);
    bool at_end = true;
    for (size_t rank = 0; rank < programs_.size(); ++rank) {
      const auto& events = programs_[rank]->events();
      if (position_[rank] == events.size()) continue;
      at_end = false;
      const Program::Event& event = events[position_[rank]];
      if (event.wait >= 0) {
        if (!programs_[rank]->may_pass(event.wait, image_)) continue;
        ++position_[rank];
        explore();
        --position_[rank];
        continue;
      }
      const uint64_t old_word = image_.load(event.offset);
      const int64_t old_begun = begun_[rank], old_ended = ended_[rank];
      image_.store(event.offset, event.word);
      begun_[rank] = std::max(begun_[rank], event.begins);
      ended_[rank] = std::max(ended_[rank], event.ends);
      ++position_[rank];
      explore();
      --position_[rank];
      begun_[rank] = old_begun;
      ended_[rank] = old_ended;
      image_.store(event.offset, old_word);
    }
    end_ = end_ || at_end;
  }

  void check() {
    const auto whole = whole_slots(image_);
    for (const WholeSlot& slot : whole) {
      const int64_t step = slot.header.step;
      for (uint64_t cell = 0; cell < kCells; ++cell)
        if (image_.load(StateMemory::common_at(slot.slot) + 8 * cell) != common_cell(step, cell))
          return note("a slot is called whole but has other data than step " + std::to_string(step));
      for (int rank = 0; rank < slot.world_size(); ++rank)
        if (image_.load(StateMemory::own_at(slot.slot, rank)) != own_cell(step, rank))
          return note("a slot is called whole but lacks what a rank had of its own");
    }
    const int64_t newest = whole.empty() ? 0 : whole.front().header.step;
    if (newest < *std::min_element(ended_.begin(), ended_.end())) note("a save that all ranks ended is lost");
    if (newest < *std::max_element(begun_.begin(), begun_.end()) - 1) note("more than the save in hand is lost");
  }
  void note(const std::string& what) {
    if (fault_.empty()) fault_ = what;
  }

  Image image_;
  std::vector<size_t> position_;
  std::vector<std::unique_ptr<Program>> programs_;
  int64_t base_step_ = 0;
  std::vector<int64_t> begun_, ended_;  // by rank: the last step
  std::set<std::vector<size_t>> visited_;
  const std::function<void(const Image&)>* visit_ = nullptr;
  std::string fault_;
  bool end_ = false;
};

const std::function<void(const Image&)> kNothing = [](const Image&) {};

TEST(MemorySlots, OneSlotIsWholeWheneverTwoRanksDieAndAlsoWhenTheyDieAgainAfterARestart) {
  Explorer first(Image(), 2, 3, Variant::kAsItIs);
  size_t restarts = 0;
  const size_t states = first.run([&](const Image& left) {
    for (const int world_size : {1, 2}) {
      Explorer again(left, world_size, 2, Variant::kAsItIs);
      again.run(kNothing);
      ++restarts;
      ASSERT_EQ(again.fault(), "") << "on " << world_size << " ranks";
      ASSERT_TRUE(again.came_to_the_end());
    }
  });
  EXPECT_EQ(first.fault(), "");
  EXPECT_TRUE(first.came_to_the_end());
  EXPECT_GT(states, 500u);
  EXPECT_EQ(restarts, 2 * states);
}

TEST(MemorySlots, OneSlotIsWholeWheneverThreeRanksDie) {
  const unsigned seed = std::random_device()();
  std::mt19937 chance(seed);
  Explorer first(Image(), 3, 3, Variant::kAsItIs);
  const size_t states = first.run([&](const Image& left) {
    if (chance() % 20 != 0) return;  // there are too many to try what follows on each
    for (const int world_size : {1, 2, 3}) {
      Explorer again(left, world_size, 2, Variant::kAsItIs);
      again.run(kNothing);
      ASSERT_EQ(again.fault(), "") << "seed " << seed << ", on " << world_size << " ranks";
    }
  });
  EXPECT_EQ(first.fault(), "");
  EXPECT_TRUE(first.came_to_the_end());
  EXPECT_GT(states, 5000u);
}

TEST(MemorySlots, TheExplorerFindsWhatWouldBeWrong) {
  for (const int world_size : {2, 3}) {
    Explorer early(Image(), world_size, 2, Variant::kRecordBeforeData);
    early.run(kNothing);
    EXPECT_EQ(early.fault(), "a slot is called whole but has other data than step 1");
    Explorer whole(Image(), world_size, 3, Variant::kSlotStaysWhole);
    whole.run(kNothing);
    EXPECT_EQ(whole.fault(), "a slot is called whole but has other data than step 1");
  }
  Explorer hasty(Image(), 2, 3, Variant::kNobodyWaits);
  hasty.run(kNothing);
  EXPECT_EQ(hasty.fault(), "more than the save in hand is lost");
}

TEST(MemorySlots, WhatRanksSayDifferentlyIsNotWhole) {
  Image memory;
  std::vector<SlotWriter> ranks;
  for (int rank = 0; rank < 3; ++rank) ranks.emplace_back(memory, rank, 3, first_turn(memory));
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(ranks[static_cast<size_t>(rank)].unfinished_rank(), -1);
    ranks[static_cast<size_t>(rank)].begin();
  }
  const SaveHeader header{.step = 4, .owner = kOwner, .layout = 1, .common_bytes = 8};
  SaveHeader other = header;
  other.layout = 2;
  ranks[0].finish(header, 8);
  EXPECT_EQ(ranks[0].unfinished_rank(), 1);
  ranks[1].finish(header, 8);
  EXPECT_EQ(ranks[0].unfinished_rank(), 2);
  ranks[2].finish(other, 8);
  EXPECT_EQ(ranks[0].unfinished_rank(), -1);
  EXPECT_TRUE(whole_slots(memory).empty());
}

TEST(MemorySlots, WhateverLiesInTheMemoryIsNoWholeSlot) {
  std::mt19937_64 chance(1);
  for (int turn = 0; turn < 2000; ++turn) {
    Image memory;
    for (int rank = 0; rank < 2; ++rank) {
      SlotWriter writer(memory, rank, 2, {.slot = 0, .sequence = 9});
      writer.finish({.step = 1, .owner = kOwner, .layout = 1, .common_bytes = 8}, 8);
    }
    ASSERT_TRUE(whole_slot(memory, 0));
    const uint64_t offset = StateMemory::record_at(0, static_cast<int>(chance() % 2)) + chance() % 8 * 8;
    memory.store(offset, turn % 2 == 0 ? chance() : memory.load(offset) ^ uint64_t{1} << chance() % 64);
    ASSERT_FALSE(whole_slot(memory, 0)) << "turn " << turn;
  }
}

TEST(MappedSlots, WhatAProcessWroteOutlivesIt) {
  const FileDescriptor held = StateMemory::make();
  ASSERT_TRUE(StateMemory::is(held.get()));
  std::string data(3 << 20, '\0');
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(i * 31 >> 3);
  const pid_t child = ::fork();
  if (child == 0) {
    MappedSlots slots(held.get());
    slots.open_window(MappedSlots::kCommon1, StateMemory::common_at(1), data.size());
    slots.open_window(MappedSlots::kOwn1, StateMemory::own_at(1, 0), 8);
    SlotWriter writer(slots, 0, 1, {.slot = 1, .sequence = 7});
    writer.begin();
    for (size_t at = 0; at < data.size(); at += 100'000)  // pieces that are streamed, and not at multiples of 64
      writer.write_common(at, data.data() + at, std::min<size_t>(100'000, data.size() - at));
    writer.write_own(0, "12345678", 8);
    writer.finish({.step = 3, .owner = kOwner, .layout = 1, .common_bytes = data.size()}, 8);
    ::kill(::getpid(), SIGKILL);
  }
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  const MappedSlots slots(held.get());
  const auto whole = whole_slots(slots);
  ASSERT_EQ(whole.size(), 1u);
  EXPECT_EQ(whole[0].header.step, 3);
  EXPECT_EQ(first_turn(slots).slot, 0);
  EXPECT_EQ(first_turn(slots).sequence, 8u);
  std::string common(data.size(), '\0'), own(8, '\0');
  slots.read(StateMemory::common_at(1), common.data(), common.size());
  slots.read(StateMemory::own_at(1, 0), own.data(), own.size());
  EXPECT_TRUE(common == data);
  EXPECT_EQ(own, "12345678");
  EXPECT_GE(slots.committed_bytes(), data.size());
  EXPECT_LT(slots.committed_bytes(), data.size() + (5 << 20));  // the records are read once
}

TEST(MappedSlots, TooLittleMemoryIsAnErrorWithBothSizes) {
  const FileDescriptor held = StateMemory::make();
  MappedSlots slots(held.get());
  try {
    slots.open_window(MappedSlots::kCommon0, StateMemory::common_at(0), StateMemory::kCommonBytes);
    FAIL() << "nobody has 64 TiB";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("takes 67108864 MiB, but only "), std::string::npos) << error.what();
  }
  EXPECT_THROW(MappedSlots(0), Error);
}

}  // namespace
}  // namespace lockstep
