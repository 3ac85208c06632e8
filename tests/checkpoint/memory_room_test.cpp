#include "checkpoint/memory_room.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/state_memory.h"

namespace lockstep::memory_room_test {
namespace {

TEST(MemoryRoom, RanksOfAMachineShareTheCommonImage) {
  const FileDescriptor shared = StateMemory::make();
  constexpr uint64_t kCommon = 1000000, kOwn = 5000;
  uint64_t end = 0;
  for (int rank = 0; rank < 3; ++rank) {
    MappedSlots memory(shared.get());
    MemoryRoom room(memory, rank, rank, 3);
    EXPECT_EQ(room.common_capacity(), 0u);
    room.open(kCommon, kOwn);
    EXPECT_GE(room.common_capacity(), kCommon);
    EXPECT_GE(room.own_capacity(), kOwn);
    EXPECT_EQ(room.begin(), end);
    end = room.end();
    EXPECT_EQ(end == room.common_capacity(), rank == 2);
    room.open_own(10 * kOwn);
    EXPECT_GE(room.own_capacity(), 10 * kOwn);
  }
}

TEST(MemoryRoom, WhatAllWantIsComparedWithWhatThereIs) {
  CheckpointMessage first, second;
  first.text = second.text = "1000000";
  first.state = second.state = "5000";
  first.steps = second.steps = 1 << 30;
  EXPECT_NO_THROW(MemoryRoom::check({first, second}));
  second.steps = 1000000;  // on the machine that has least
  try {
    MemoryRoom::check({first, second});
    FAIL() << "there was room";
  } catch (const LimitError& error) {
    EXPECT_NE(std::string(error.what()).find("but only 1 MiB are available"), std::string::npos) << error.what();
  }
}

TEST(MemoryRoom, ARanksOwnStateHasALimit) {
  const FileDescriptor shared = StateMemory::make();
  MappedSlots memory(shared.get());
  MemoryRoom room(memory, 0, 0, 1);
  EXPECT_THROW(room.open_own(StateMemory::kOwnBytes + 1), LimitError);
}

}  // namespace
}  // namespace lockstep::memory_room_test
