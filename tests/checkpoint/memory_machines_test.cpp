#include "checkpoint/memory_machines.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

#include "base/error.h"
#include "base/state_memory.h"
#include "checkpoint/checkpoint_part.h"
#include "checkpoint/memory/mapped_slots.h"
#include "checkpoint/memory/slot_source.h"
#include "checkpoint/object_reader.h"
#include "checkpoint/packed_object.h"
#include "support/ranks.h"

// Machines are letters here: each has memory of its own, whatever machine the ranks really run on.

namespace lockstep::memory_machines_test {
namespace {

using testing::run_ranks;

constexpr uint64_t kOwner = 77, kLayout = 5;

/// By rank, the first rank of its machine: "aab" -> 0, 0, 2.
std::vector<int> first_ranks(const std::string& machines) {
  std::vector<int> first;
  for (const char machine : machines) first.push_back(static_cast<int>(machines.find(machine)));
  return first;
}

std::string common_image(int64_t step, uint64_t bytes) {
  std::string image(bytes, static_cast<char>(step));
  for (uint64_t at = 0; at < bytes; at += 97) image[at] = static_cast<char>(at / 97 + static_cast<uint64_t>(step));
  return image;
}

std::string own_text(int64_t step, int rank) {
  const std::string longer(static_cast<size_t>(rank), '!');
  return "step " + std::to_string(step) + " of rank " + std::to_string(rank) + longer;
}

c10::IValue own_object(int64_t step, int rank) {
  c10::impl::GenericDict object = new_dict();
  object.insert("text", own_text(step, rank));
  return object;
}

std::string read(const SlotMemory& memory, uint64_t offset, uint64_t bytes) {
  std::string text(bytes, '\0');
  memory.read(offset, text.data(), bytes);
  return text;
}

/// One memory for each letter, which a rank maps after its fork.
class Memories {
 public:
  explicit Memories(const std::string& machines) {
    for (const char machine : machines)
      if (!fds_.contains(machine)) fds_[machine] = StateMemory::make();
  }
  MappedSlots of(char machine) const { return MappedSlots(fds_.at(machine).get()); }

 private:
  std::map<char, FileDescriptor> fds_;
};

/// One rank of a training that saves `saves` times as MemoryTier does.
void save_as_the_tier_does(const Group& group, SlotMemory& memory, MemoryMachines& machines, int64_t first_step,
                           int saves) {
  constexpr uint64_t kCommonBytes = 1000;
  const SlotTurn turn = MemoryMachines::agree_on_turn(group, memory);
  SlotWriter writer(memory, group.rank(), group.world_size(), turn);
  machines.begin_keeping(memory, turn);
  for (int64_t step = first_step; step < first_step + saves; ++step) {
    const ObjectWriter own(own_object(step, group.rank()));
    machines.exchange(group, own, kLayout);
    if (!machines.several()) group.barrier();  // the tier waits for the records of the last save
    EXPECT_EQ(writer.unfinished_rank(), -1) << "all have done with the save before";
    writer.begin();
    const auto part = [&](int of) {
      return kCommonBytes * static_cast<uint64_t>(of) / static_cast<uint64_t>(machines.ranks_here());
    };
    const uint64_t begin = part(machines.rank_here()), end = part(machines.rank_here() + 1);
    writer.write_common(begin, common_image(step, kCommonBytes).data() + begin, end - begin);
    struct Sink : ByteSink {
      explicit Sink(SlotWriter& to) : writer(to) {}
      void write(const void* data, size_t size) override {
        writer.write_own(at, data, size);
        at += size;
      }
      SlotWriter& writer;
      uint64_t at = 0;
    } sink(writer);
    own.write(sink, "state", ZipWriter::Checksums::kWholeEntries);
    const SaveHeader header{.step = step, .owner = kOwner, .layout = kLayout, .common_bytes = kCommonBytes};
    writer.finish(header, sink.at);
    machines.keep(header);
  }
  group.barrier();
}

/// That this memory alone has the whole state of `step`.
void expect_whole(const SlotMemory& memory, const WholeSlot& slot, int64_t step, int ranks) {
  EXPECT_EQ(slot.header.step, step);
  EXPECT_EQ(slot.header.layout, kLayout);
  ASSERT_EQ(slot.world_size(), ranks);
  EXPECT_EQ(read(memory, StateMemory::common_at(slot.slot), slot.header.common_bytes),
            common_image(step, slot.header.common_bytes));
  for (int rank = 0; rank < ranks; ++rank) {
    const SlotSource source("own", memory, StateMemory::own_at(slot.slot, rank),
                            slot.own_bytes[static_cast<size_t>(rank)]);
    EXPECT_EQ(ObjectReader(source).object().toGenericDict().at("text").toStringRef(), own_text(step, rank));
  }
}

const char* const kWorlds[] = {"ab", "aab", "abb", "aabb", "abab", "abc"};

TEST(MemoryMachines, EachKnowsItsPlace) {
  const MemoryMachines first({0, 0, 2, 2, 2}, 0), last({0, 0, 2, 2, 2}, 4), alone({0, 0}, 1);
  EXPECT_TRUE(first.several() && first.leads());
  EXPECT_EQ(first.ranks_here(), 2);
  EXPECT_EQ(first.rank_here(), 0);
  EXPECT_TRUE(last.several() && !last.leads());
  EXPECT_EQ(last.ranks_here(), 3);
  EXPECT_EQ(last.rank_here(), 2);
  EXPECT_FALSE(alone.several());
  EXPECT_FALSE(alone.leads());
}

TEST(MemoryMachines, SlicesAreOnTheNextMachineToo) {
  for (const std::string world : {"ab", "aabb", "abb", "aab", "abc", "aabbcc", "abbc"}) {
    const std::vector<int> first = first_ranks(world);
    const int ranks = static_cast<int>(world.size());
    std::vector<int> received(world.size(), 0);
    for (int on = 0; on < ranks; ++on) {
      const MemoryMachines machines(first, on);
      for (const int source : machines.sources()) {
        ++received[static_cast<size_t>(source)];
        EXPECT_TRUE(machines.holds_slices(on, source)) << world;
        EXPECT_NE(world[static_cast<size_t>(on)], world[static_cast<size_t>(source)]) << world;
      }
      for (int rank = 0; rank < ranks; ++rank) {
        const auto here = world[static_cast<size_t>(on)] - 'a', there = world[static_cast<size_t>(rank)] - 'a';
        const int count = world.back() - 'a' + 1;
        EXPECT_EQ(machines.holds_slices(on, rank), here == there || here == (there + 1) % count) << world;
      }
    }
    EXPECT_EQ(received, std::vector<int>(world.size(), 1)) << world << ": each rank sends to one";
  }
}

TEST(MemoryMachines, EachMachineHoldsTheStateOfAllRanks) {
  for (const std::string world : kWorlds) {
    const Memories memories(world);
    const int ranks = static_cast<int>(world.size());
    run_ranks(ranks, [&](Context& context) {
      MappedSlots memory = memories.of(world[static_cast<size_t>(context.rank())]);
      MemoryMachines machines(first_ranks(world), context.rank());
      save_as_the_tier_does(context.group(), memory, machines, 10, 3);
      const auto slots = whole_slots(memory);
      ASSERT_EQ(slots.size(), 2u) << world;
      expect_whole(memory, slots[0], 12, ranks);
      expect_whole(memory, slots[1], 11, ranks);
    });
  }
}

TEST(MemoryMachines, OnOneMachineNothingIsKeptOfOthers) {
  const Memories memories("a");
  run_ranks(2, [&](Context& context) {
    MappedSlots memory = memories.of('a');
    MemoryMachines machines({0, 0}, context.rank());
    save_as_the_tier_does(context.group(), memory, machines, 10, 1);
    const auto slots = whole_slots(memory);
    ASSERT_EQ(slots.size(), 1u);
    expect_whole(memory, slots[0], 10, 2);
  });
}

/// What a machine's memory holds, newest first: numbers of saves, of which `slots` has the places.
struct Held {
  std::vector<uint64_t> sequences;
  std::vector<int> slots;
};

constexpr uint64_t kCommonBytes = (16 << 20) + 3;  // more than what is sent at a time

/// All ranks' parts of the save with this number, which is one of step 100 more.
void put(SlotMemory& memory, int ranks, int slot, uint64_t sequence) {
  const auto step = static_cast<int64_t>(100 + sequence);
  for (int rank = 0; rank < ranks; ++rank) {
    SlotWriter writer(memory, rank, ranks, {.slot = slot, .sequence = sequence});
    writer.begin();
    if (rank == 0) writer.write_common(0, common_image(step, kCommonBytes).data(), kCommonBytes);
    const std::string own = packed(own_object(step, rank));
    writer.write_own(0, own.data(), own.size());
    writer.finish({.step = step, .owner = kOwner, .layout = kLayout, .common_bytes = kCommonBytes}, own.size());
  }
}

/// One rank on each machine, whose memory holds what `held` says before `body`.
void with_memories(const std::vector<Held>& held,
                   const std::function<void(Context&, MappedSlots&, const MemoryMachines&)>& body) {
  const int ranks = static_cast<int>(held.size());
  const std::string world = std::string("abc").substr(0, held.size());
  const Memories memories(world);
  run_ranks(ranks, [&](Context& context) {
    const auto rank = static_cast<size_t>(context.rank());
    MappedSlots memory = memories.of(world[rank]);
    for (size_t i = 0; i < held[rank].sequences.size(); ++i)
      put(memory, ranks, held[rank].slots[i], held[rank].sequences[i]);
    context.group().barrier();
    body(context, memory, MemoryMachines(first_ranks(world), context.rank()));
  });
}

/// What newest_for_all() chooses, on every rank; 0: nothing.
void expect_newest(const std::vector<Held>& held, uint64_t expected) {
  with_memories(held, [&](Context& context, MappedSlots& memory, const MemoryMachines& machines) {
    const auto found = machines.newest_for_all(context.group(), memory, whole_slots(memory));
    ASSERT_EQ(found.has_value(), expected != 0);
    if (!found) return;
    EXPECT_EQ(found->sequence, expected);
    // It lies where the answer says, also on machines that did not have it.
    const auto here = whole_slot(memory, found->slot);
    ASSERT_TRUE(here);
    EXPECT_EQ(here->sequence, expected);
    const auto step = static_cast<int64_t>(100 + expected);
    EXPECT_EQ(here->header.step, step);
    EXPECT_EQ(read(memory, StateMemory::common_at(found->slot), kCommonBytes), common_image(step, kCommonBytes));
    for (int rank = 0; rank < context.world_size(); ++rank)
      EXPECT_EQ(read(memory, StateMemory::own_at(found->slot, rank), here->own_bytes[static_cast<size_t>(rank)]),
                packed(own_object(step, rank)));
  });
}

TEST(MemoryMachines, TheNewestThatAllHaveIsTaken) {
  expect_newest({{}, {}}, 0);
  expect_newest({{{5, 4}, {0, 1}}, {{5, 4}, {0, 1}}}, 5);
  expect_newest({{{5, 4}, {0, 1}}, {{4}, {1}}}, 4);
  expect_newest({{{4, 3}, {1, 0}}, {{5, 4}, {0, 1}}, {{4}, {0}}}, 4);
}

TEST(MemoryMachines, WhatIsNotOnAllIsSentToThoseThatLackIt) {
  expect_newest({{{5, 4}, {0, 1}}, {}}, 5);
  expect_newest({{}, {{5}, {1}}}, 5);
  expect_newest({{{5}, {1}}, {{5}, {1}}, {{4}, {0}}}, 5);
  expect_newest({{{3}, {0}}, {}, {{4}, {0}}}, 4);
}

/// Memory that takes nothing more.
class Full final : public SlotMemory {
 public:
  explicit Full(SlotMemory& memory) : memory_(memory) {}
  uint64_t load(uint64_t offset) const override { return memory_.load(offset); }
  void store(uint64_t offset, uint64_t word) override { memory_.store(offset, word); }
  void write(uint64_t, const void*, uint64_t) override { throw LimitError("no more"); }
  void read(uint64_t offset, void* to, uint64_t bytes) const override { memory_.read(offset, to, bytes); }

 private:
  SlotMemory& memory_;
};

TEST(MemoryMachines, AStateThatCannotBeSentIsWholeNowhereElse) {
  const std::vector<Held> held = {{{5}, {0}}, {}, {{4}, {0}}};
  with_memories(held, [&](Context& context, MappedSlots& memory, const MemoryMachines& machines) {
    Full full(memory);
    SlotMemory& used = context.rank() == 1 ? static_cast<SlotMemory&>(full) : memory;
    EXPECT_FALSE(machines.newest_for_all(context.group(), used, whole_slots(used))) << "on no machine";
    for (const WholeSlot& slot : whole_slots(memory)) EXPECT_EQ(slot.sequence, context.rank() == 0 ? 5u : 4u);
    EXPECT_EQ(whole_slots(memory).size(), context.rank() == 1 ? 0u : 1u) << "what was there stays";
  });
}

TEST(MemoryMachines, TheFirstSaveOfAStartSparesWhatAllHave) {
  struct Case {
    std::vector<Held> held;
    std::vector<int> slots;  // that are overwritten
    uint64_t sequence;
  };
  const std::vector<Case> cases = {
      {{{}, {}}, {0, 0}, 1},
      {{{{5, 4}, {0, 1}}, {{5, 4}, {0, 1}}}, {1, 1}, 6},
      // The first has one that the second lacks: the next save goes over it, not over the one that both have.
      {{{{5, 4}, {0, 1}}, {{4}, {1}}}, {0, 0}, 6},
      {{{{4}, {0}}, {{5, 4}, {0, 1}}}, {1, 0}, 6},
      {{{{5}, {1}}, {}}, {0, 0}, 6},
  };
  for (const Case& one : cases)
    with_memories(one.held, [&](Context& context, MappedSlots& memory, const MemoryMachines&) {
      const SlotTurn turn = MemoryMachines::agree_on_turn(context.group(), memory);
      EXPECT_EQ(turn.slot, one.slots[static_cast<size_t>(context.rank())]);
      EXPECT_EQ(turn.sequence, one.sequence) << "above all numbers anywhere";
    });
}

TEST(MemoryMachines, ALostMachinesStateComesBackAndTheTrainingGoesOn) {
  const std::string world = "aab";
  const Memories before(world), fresh("b");
  run_ranks(3, [&](Context& context) {
    MappedSlots memory = before.of(world[static_cast<size_t>(context.rank())]);
    MemoryMachines machines(first_ranks(world), context.rank());
    save_as_the_tier_does(context.group(), memory, machines, 10, 2);
  });
  run_ranks(3, [&](Context& context) {
    MappedSlots memory = context.rank() == 2 ? fresh.of('b') : before.of('a');
    MemoryMachines machines(first_ranks(world), context.rank());
    const auto mine = machines.leads() ? whole_slots(memory) : std::vector<WholeSlot>();
    EXPECT_EQ(mine.size(), context.rank() == 0 ? 2u : 0u);
    const auto found = machines.newest_for_all(context.group(), memory, mine);
    ASSERT_TRUE(found);
    if (machines.leads()) expect_whole(memory, *found, 11, 3);
    save_as_the_tier_does(context.group(), memory, machines, 12, 2);
    const auto slots = whole_slots(memory);
    ASSERT_EQ(slots.size(), 2u);
    expect_whole(memory, slots[0], 13, 3);
  });
}

}  // namespace
}  // namespace lockstep::memory_machines_test
