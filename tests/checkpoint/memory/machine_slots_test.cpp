#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/state_memory.h"
#include "checkpoint/memory/memory_slots.h"

// Ranks on several machines, each with a memory of its own, that save states of which a part lies in slices: every
// order of their writes, a death of all ranks after each, and the loss of any machine with its memory. The ranks write
// in the order of MemoryTier::save(). What is left must be resumable, and at most the save in hand is lost.

namespace lockstep::machine_slots_test {
namespace {

constexpr uint64_t kOwner = 77, kWord = 8;

/// Memory of 8-byte cells; those that were never written are 0.
class Cells final : public SlotMemory {
 public:
  uint64_t load(uint64_t offset) const override {
    const auto found = cells_.find(offset);
    return found == cells_.end() ? 0 : found->second;
  }
  void store(uint64_t offset, uint64_t word) override { cells_[offset] = word; }
  void write(uint64_t offset, const void* data, uint64_t bytes) override {
    for (uint64_t i = 0; i < bytes / kWord; ++i) store(offset + kWord * i, static_cast<const uint64_t*>(data)[i]);
  }
  void read(uint64_t offset, void* to, uint64_t bytes) const override {
    for (uint64_t i = 0; i < bytes / kWord; ++i) static_cast<uint64_t*>(to)[i] = load(offset + kWord * i);
  }
  const std::map<uint64_t, uint64_t>& cells() const { return cells_; }
  void set(std::map<uint64_t, uint64_t> cells) { cells_ = std::move(cells); }

 private:
  std::map<uint64_t, uint64_t> cells_;
};

using Memory = std::map<uint64_t, uint64_t>;

/// `machines` of `ranks` each; neighbouring ranks share a machine.
struct World {
  int machines = 1, ranks = 1;
  int all() const { return machines * ranks; }
  int machine_of(int rank) const { return rank / ranks; }
  bool holds(int machine, int rank) const {
    return machine_of(rank) == machine || (machine_of(rank) + 1) % machines == machine;
  }
  // The common image: a cell for each rank of a machine, then one for each rank's slice.
  uint64_t cells() const { return static_cast<uint64_t>(ranks + all()); }
  uint64_t slice_at(int rank) const { return kWord * static_cast<uint64_t>(ranks + rank); }
};

uint64_t common_of(int64_t step, int number) { return static_cast<uint64_t>(step * 1000 + number); }
uint64_t own_of(int64_t step, int rank) { return common_of(step, 300 + rank); }
uint64_t slice_of(int64_t step, int rank) { return common_of(step, 600 + rank); }
/// The header tells what the world was.
uint64_t layout_of(const World& world) { return static_cast<uint64_t>(world.machines * 100 + world.ranks); }

enum class Variant { kAsItIs, kRecordBeforeCopies, kCopiesUnwritten, kNobodyWaits };

/// What one rank does in a start: it writes to its machine's memory.
class Program final : public SlotMemory {
 public:
  struct Event {
    int exchange = 0;                                       ///< > 0: goes on when all ranks have come here
    int sender = -1;                                        ///< >= 0: goes on when that rank has sent its slice
    std::vector<std::pair<uint64_t, uint64_t>> words = {};  ///< written
    int64_t begins = 0, ends = 0;                           ///< the step whose save begins or ends with it
  };

  Program(const World& world, int rank, SlotTurn turn, int64_t first_step, int saves, Variant variant) {
    const int machine = world.machine_of(rank), here = rank % world.ranks,
              before = (machine + world.machines - 1) % world.machines;
    SlotWriter writer(*this, rank, world.all(), turn);
    std::vector<int> kept;
    std::vector<SlotWriter> writers;
    for (int other = 0, i = 0; other < world.all(); ++other)
      if (world.machine_of(other) != machine && i++ % world.ranks == here) kept.push_back(other);
    for (const int other : kept) writers.emplace_back(*this, other, world.all(), turn);
    const auto put = [&](SlotWriter& of, uint64_t at, uint64_t word) { of.write_common(at, &word, kWord); };
    for (int64_t step = first_step; step < first_step + saves; ++step) {
      if (variant != Variant::kNobodyWaits) events_.push_back({.exchange = static_cast<int>(step - first_step) + 1});
      const size_t beginning = events_.size();
      writer.begin();
      put(writer, kWord * static_cast<uint64_t>(here), common_of(step, here));
      put(writer, world.slice_at(rank), slice_of(step, rank));
      const SaveHeader header{
          .step = step, .owner = kOwner, .layout = layout_of(world), .common_bytes = kWord * world.cells()};
      const auto copies = [&] {
        for (int source = before * world.ranks + here; world.machines > 1 && source == before * world.ranks + here;
             ++source) {
          events_.push_back({.sender = source});
          if (variant != Variant::kCopiesUnwritten) put(writer, world.slice_at(source), slice_of(step, source));
        }
      };
      const auto record = [&] {
        const uint64_t own = own_of(step, rank);
        writer.write_own(0, &own, kWord);
        writer.finish(header, kWord);
      };
      if (variant != Variant::kRecordBeforeCopies) copies();
      record();
      if (variant == Variant::kRecordBeforeCopies) copies();
      for (size_t i = 0; i < kept.size(); ++i) {
        const uint64_t own = own_of(step, kept[i]);
        writers[i].begin();
        writers[i].write_own(0, &own, kWord);
        writers[i].finish(header, kWord, world.holds(machine, kept[i]));
      }
      events_[beginning].begins = step;
      events_.back().ends = step;
    }
  }

  const std::vector<Event>& events() const { return events_; }
  /// Where this rank stands once it has sent its slice in that save, or has come to its exchange.
  size_t place_of(int exchange) const {
    for (size_t i = 0; i < events_.size(); ++i)
      if (events_[i].exchange == exchange) return i;
    return events_.size();
  }

 private:
  uint64_t load(uint64_t) const override { return 0; }
  void store(uint64_t offset, uint64_t word) override {
    // The words of a record but its sequence are one write: in between, its sequence says that it is none.
    const bool is_inner = offset < StateMemory::kRecordsBytes && offset % StateMemory::kRecordBytes != 0;
    if (is_inner && inner_)
      events_.back().words.emplace_back(offset, word);
    else
      events_.push_back({.words = {{offset, word}}});
    inner_ = is_inner;
  }
  void write(uint64_t offset, const void* data, uint64_t bytes) override {
    for (uint64_t i = 0; i < bytes / kWord; ++i) store(offset + kWord * i, static_cast<const uint64_t*>(data)[i]);
  }
  void read(uint64_t, void*, uint64_t) const override { FAIL() << "a save reads no data"; }

  std::vector<Event> events_;
  bool inner_ = false;
};

std::vector<HeldState> held(const Memory& memory) {
  Cells cells;
  cells.set(memory);
  std::vector<HeldState> states;
  for (const WholeSlot& slot : whole_slots(cells)) states.push_back({.sequence = slot.sequence, .sliced = slot.sliced});
  return states;
}

/// What these machines resume: its step, 0 without one, or in words what is wrong with it.
struct Left {
  int64_t step = 0;
  std::string fault;
};

Left left_on(const std::vector<Memory>& memories) {
  std::vector<std::vector<HeldState>> all;
  for (const Memory& memory : memories) all.push_back(held(memory));
  const uint64_t newest = newest_resumable(all);
  Left left;
  std::set<int> slices;
  size_t ranks = 0;
  for (const Memory& memory : memories) {
    Cells cells;
    cells.set(memory);
    for (const WholeSlot& slot : whole_slots(cells)) {
      if (slot.sequence != newest) continue;
      const int64_t step = left.step = slot.header.step;
      const World world{static_cast<int>(slot.header.layout / 100), static_cast<int>(slot.header.layout % 100)};
      ranks = slot.own_bytes.size();
      for (int cell = 0; cell < world.ranks; ++cell)
        if (cells.load(StateMemory::common_at(slot.slot) + kWord * static_cast<uint64_t>(cell)) !=
            common_of(step, cell))
          left.fault = "a slot is called whole but has other data than its step";
      for (int rank = 0; rank < slot.world_size(); ++rank) {
        if (cells.load(StateMemory::own_at(slot.slot, rank)) != own_of(step, rank))
          left.fault = "a slot is called whole but lacks what a rank had of its own";
        if (!slot.sliced[static_cast<size_t>(rank)]) continue;
        slices.insert(rank);
        if (cells.load(StateMemory::common_at(slot.slot) + world.slice_at(rank)) != slice_of(step, rank))
          left.fault = "a slot is called whole but has not the slice of its step";
      }
    }
  }
  if (left.fault.empty() && slices.size() != ranks) left.fault = "a state is resumed of which slices are nowhere";
  return left;
}

/// All states of one start.
class Explorer {
 public:
  /// `memories`: of the machines.
  Explorer(const World& world, std::vector<Memory> memories, int saves, Variant variant)
      : world_(world), memories_(std::move(memories)), position_(static_cast<size_t>(world.all())) {
    const Left before = left_on(memories_);
    fault_ = before.fault;
    base_step_ = before.step;
    std::vector<std::vector<HeldState>> all;
    uint64_t sequence = 0;
    std::vector<SlotTurn> turns;
    for (const Memory& memory : memories_) {
      Cells cells;
      cells.set(memory);
      turns.push_back(first_turn(cells));
      all.push_back(held(memory));
      sequence = std::max(sequence, turns.back().sequence);
    }
    // As MemoryMachines::agree_on_turn().
    const uint64_t spared = newest_resumable(all);
    for (size_t i = 0; i < memories_.size(); ++i) {
      Cells cells;
      cells.set(memories_[i]);
      turns[i].sequence = sequence;
      for (const WholeSlot& slot : whole_slots(cells))
        if (slot.sequence == spared) turns[i].slot = 1 - slot.slot;
    }
    for (int rank = 0; rank < world.all(); ++rank)
      programs_.push_back(std::make_unique<Program>(world, rank, turns[static_cast<size_t>(world.machine_of(rank))],
                                                    base_step_ + 1, saves, variant));
    begun_.assign(programs_.size(), base_step_);
    ended_ = begun_;
  }

  using Visit = std::function<void(const std::vector<Memory>&)>;
  /// Every state that can be reached; calls `visit` with the memories of each.
  size_t run(const Visit& visit) {
    explore(visit);
    return visited_.size();
  }
  /// One way through them.
  void walk(std::mt19937& chance, const Visit& visit) {
    for (;;) {
      check();
      visit(memories_);
      std::vector<size_t> able;
      for (size_t rank = 0; rank < programs_.size(); ++rank)
        if (may_step(rank)) able.push_back(rank);
      if (able.empty()) break;
      step(able[chance() % able.size()]);
    }
    end_ = at_end();
  }
  /// In words, of the first state that is wrong; empty: none is.
  const std::string& fault() const { return fault_; }
  bool came_to_the_end() const { return end_; }

 private:
  bool at_end() const {
    for (size_t rank = 0; rank < programs_.size(); ++rank)
      if (position_[rank] != programs_[rank]->events().size()) return false;
    return true;
  }

  bool may_step(size_t rank) const {
    const auto& events = programs_[rank]->events();
    if (position_[rank] == events.size()) return false;
    const Program::Event& event = events[position_[rank]];
    for (size_t other = 0; event.exchange > 0 && other < programs_.size(); ++other)
      if (position_[other] < programs_[other]->place_of(event.exchange)) return false;
    if (event.sender < 0) return true;
    // It has sent its slice of this save when it has written that itself: the third write behind its exchange.
    const auto source = static_cast<size_t>(event.sender);
    int64_t step = 0;
    for (size_t i = 0; i < position_[rank]; ++i) step = std::max(step, events[i].begins);
    size_t place = 0;
    while (programs_[source]->events()[place].begins != step) ++place;
    return position_[source] >= place + 3;
  }

  /// Returns how to undo it.
  std::function<void()> step(size_t rank) {
    const Program::Event& event = programs_[rank]->events()[position_[rank]];
    Memory& memory = memories_[static_cast<size_t>(world_.machine_of(static_cast<int>(rank)))];
    std::vector<std::pair<uint64_t, uint64_t>> old;
    for (const auto& [offset, word] : event.words) {
      old.emplace_back(offset, memory[offset]);
      memory[offset] = word;
    }
    const int64_t begun = begun_[rank], ended = ended_[rank];
    begun_[rank] = std::max(begun, event.begins);
    ended_[rank] = std::max(ended, event.ends);
    ++position_[rank];
    return [this, rank, &memory, old, begun, ended] {
      for (const auto& [offset, word] : old) memory[offset] = word;
      begun_[rank] = begun;
      ended_[rank] = ended;
      --position_[rank];
    };
  }

  void explore(const Visit& visit) {
    if (!fault_.empty() || !visited_.insert(position_).second) return;
    check();
    visit(memories_);
    for (size_t rank = 0; rank < programs_.size(); ++rank) {
      if (!may_step(rank)) continue;
      const auto undo = step(rank);
      explore(visit);
      undo();
    }
    end_ = end_ || at_end();
  }

  /// All ranks die now, and no machine or any one is lost.
  void check() {
    const int64_t safe = *std::min_element(ended_.begin(), ended_.end());
    const int64_t begun = *std::max_element(begun_.begin(), begun_.end());
    for (int lost = -1; lost < (world_.machines > 1 ? world_.machines : 0); ++lost) {
      // Until the first save of a start is everywhere, a machine may lack what it is to hold.
      if (lost >= 0 && safe == base_step_) continue;
      std::vector<Memory> memories = memories_;
      if (lost >= 0) memories[static_cast<size_t>(lost)].clear();
      const Left left = left_on(memories);
      if (!left.fault.empty()) note(left.fault);
      if (left.step < safe) note("a save that all ranks ended is lost");
      if (left.step < begun - 1) note("more than the save in hand is lost");
    }
  }
  void note(const std::string& what) {
    if (fault_.empty()) fault_ = what;
  }

  const World world_;
  std::vector<Memory> memories_;
  std::vector<size_t> position_;
  std::vector<std::unique_ptr<Program>> programs_;
  int64_t base_step_ = 0;
  std::vector<int64_t> begun_, ended_;  // by rank: the last step
  std::set<std::vector<size_t>> visited_;
  std::string fault_;
  bool end_ = false;
};

const Explorer::Visit kNothing = [](const auto&) {};

std::vector<Memory> empty_on(const World& world) { return std::vector<Memory>(static_cast<size_t>(world.machines)); }

/// The ranks start again after a state that they left: on as many machines, one of which may be new, or without one.
void start_again(const World& world, const std::vector<Memory>& left, std::mt19937& chance) {
  const int64_t before = left_on(left).step;
  for (int lost = -1; lost < (world.machines > 1 ? world.machines : 0); ++lost)
    for (const bool stays_away : {false, true}) {
      World then = world;
      std::vector<Memory> memories = left;
      if (lost < 0 && stays_away) continue;
      if (lost >= 0) memories[static_cast<size_t>(lost)].clear();
      if (stays_away) {
        memories.erase(memories.begin() + lost);
        --then.machines;
      }
      if (left_on(memories).step < before - 1)
        ADD_FAILURE() << "machine " << lost << " took more than the save in hand";
      Explorer again(then, memories, 2, Variant::kAsItIs);
      again.walk(chance, kNothing);
      ASSERT_EQ(again.fault(), "") << "after machine " << lost << " was lost";
      ASSERT_TRUE(again.came_to_the_end());
    }
}

TEST(MachineSlots, WhereverRanksDieAndWhicheverMachineIsLostAStateIsLeft) {
  const unsigned seed = std::random_device()();
  std::mt19937 chance(seed);
  SCOPED_TRACE("seed " + std::to_string(seed));
  for (const World world : {World{1, 2}, World{2, 1}, World{3, 1}}) {
    Explorer first(world, empty_on(world), 3, Variant::kAsItIs);
    const size_t states = first.run([&](const std::vector<Memory>& left) {
      if (!::testing::Test::HasFailure() && chance() % (world.all() > 2 ? 100 : 5) == 0)
        start_again(world, left, chance);
    });
    EXPECT_EQ(first.fault(), "") << world.machines << " x " << world.ranks;
    EXPECT_TRUE(first.came_to_the_end());
    EXPECT_GT(states, 150u);
    std::printf("%d x %d: %zu states\n", world.machines, world.ranks, states);
  }
}

TEST(MachineSlots, AlsoWithMoreRanksAndMachines) {
  const unsigned seed = std::random_device()();
  std::mt19937 chance(seed);
  SCOPED_TRACE("seed " + std::to_string(seed));
  for (const World world : {World{2, 2}, World{4, 1}, World{3, 2}})
    for (int i = 0; i < 10; ++i) {
      Explorer first(world, empty_on(world), 3, Variant::kAsItIs);
      first.walk(chance, [&](const std::vector<Memory>& left) {
        if (!::testing::Test::HasFailure() && chance() % 100 == 0) start_again(world, left, chance);
      });
      ASSERT_EQ(first.fault(), "") << world.machines << " x " << world.ranks;
      ASSERT_TRUE(first.came_to_the_end());
    }
}

TEST(MachineSlots, TheExplorerFindsWhatWouldBeWrong) {
  const auto fault_of = [](const World& world, Variant variant) {
    Explorer explorer(world, empty_on(world), 3, variant);
    explorer.run(kNothing);
    return explorer.fault();
  };
  for (const World world : {World{2, 1}, World{3, 1}}) {
    EXPECT_EQ(fault_of(world, Variant::kCopiesUnwritten), "a slot is called whole but has not the slice of its step");
    EXPECT_NE(fault_of(world, Variant::kRecordBeforeCopies), "");
  }
  EXPECT_NE(fault_of({2, 1}, Variant::kNobodyWaits), "");
}

TEST(MachineSlots, AStateIsChosenWhoseSlicesAreThere) {
  const std::vector<bool> ab{true, true, false}, bc{false, true, true}, ca{true, false, true}, none(3, false);
  EXPECT_EQ(newest_resumable({}), 0u);
  EXPECT_EQ(newest_resumable({{}, {}}), 0u);
  EXPECT_EQ(newest_resumable({{{5, ca}, {4, ca}}, {{5, ab}, {4, ab}}, {{5, bc}, {4, bc}}}), 5u);
  EXPECT_EQ(newest_resumable({{{5, ca}, {4, ca}}, {{5, ab}, {4, ab}}, {{4, bc}}}), 4u) << "all have it";
  EXPECT_EQ(newest_resumable({{{5, ca}, {4, ca}}, {{5, ab}, {4, ab}}, {}}), 5u) << "two have all of it";
  EXPECT_EQ(newest_resumable({{{5, ca}, {4, ca}}, {{4, ab}}, {}}), 4u) << "one has not";
  EXPECT_EQ(newest_resumable({{{5, ca}}, {}, {}}), 0u);
  EXPECT_EQ(newest_resumable({{{5, ca}}, {{5, none}}, {{5, none}}}), 0u) << "they were sent what is not in slices";
  EXPECT_EQ(newest_resumable({{{5, ca}}, {{5, none}}, {{5, ab}}}), 5u);
}

}  // namespace
}  // namespace lockstep::machine_slots_test
