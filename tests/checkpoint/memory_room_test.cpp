#include "checkpoint/memory_room.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

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
    const MemoryMachines machines({0, 0, 0}, rank);
    MemoryRoom room(memory, rank, machines);
    EXPECT_EQ(room.common_capacity(), 0u);
    room.open({.common_bytes = kCommon, .own_bytes = kOwn});
    EXPECT_GE(room.common_capacity(), kCommon);
    EXPECT_GE(room.own_capacity(), kOwn);
    const std::vector<ByteRange> share = room.share({});
    ASSERT_EQ(share.size(), 1u);
    EXPECT_EQ(share[0].begin, end);
    end = share[0].end;
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
  const MemoryMachines machines({0, 0}, 0);
  EXPECT_NO_THROW(MemoryRoom::check({first, second}, machines));
  second.steps = 1000000;  // on the machine that has least
  try {
    MemoryRoom::check({first, second}, machines);
    FAIL() << "there was room";
  } catch (const LimitError& error) {
    EXPECT_NE(std::string(error.what()).find("but only 1 MiB are available"), std::string::npos) << error.what();
  }
}

TEST(MemoryRoom, SlicesCountWhereTheyAreHeld) {
  const MemoryMachines machines({0, 1, 2}, 0);  // three machines of a rank
  std::vector<CheckpointMessage> ranks(3);
  for (CheckpointMessage& rank : ranks) rank.text = "0 0", rank.state = "0", rank.steps = 21 << 20;
  ranks[0].text = "0 10485760";  // 10 MiB, twice, on its machine and the next
  EXPECT_NO_THROW(MemoryRoom::check(ranks, machines));
  ranks[2].steps = 2 << 20;
  EXPECT_NO_THROW(MemoryRoom::check(ranks, machines)) << "the third holds none of them";
  ranks[1].steps = 19 << 20;
  EXPECT_THROW(MemoryRoom::check(ranks, machines), LimitError);
}

TEST(MemoryRoom, WithSlicesEachRankWritesItsOwnAndItsShareOfTheRest) {
  const FileDescriptor shared = StateMemory::make();
  constexpr uint64_t kSlice = 1 << 20;
  const ImageSlices slices({{.begin = 10'000, .slice_bytes = kSlice, .holders = {0, 2, 1}}});
  std::vector<ByteRange> written;
  for (int rank = 0; rank < 3; ++rank) {
    MappedSlots memory(shared.get());
    const MemoryMachines machines({0, 0, 0}, rank);
    MemoryRoom room(memory, rank, machines);
    room.open({.common_bytes = 3 * kSlice + 20'000, .own_bytes = 10, .slices = slices});
    const std::vector<ByteRange> share = room.share(slices);
    EXPECT_EQ(std::count(share.begin(), share.end(), slices.of_rank(rank).front()), 1);
    written.insert(written.end(), share.begin(), share.end());
    if (rank < 2) continue;
    std::sort(written.begin(), written.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
    uint64_t end = 0;
    for (const ByteRange& range : written) EXPECT_EQ(range.begin, std::exchange(end, range.end));
    EXPECT_EQ(end, room.common_capacity());
    EXPECT_TRUE(room.has_room(3 * kSlice + 20'000, slices));
    const ImageSlices moved({{.begin = 10'064, .slice_bytes = kSlice, .holders = {0, 2, 1}}});
    EXPECT_TRUE(room.has_room(3 * kSlice + 20'000, moved));
    const ImageSlices larger({{.begin = 10'000, .slice_bytes = kSlice + 64, .holders = {0, 2, 1}}});
    EXPECT_FALSE(room.has_room(3 * kSlice + 20'000, larger));
    EXPECT_FALSE(room.has_room(3 * kSlice + 20'000, {}));
  }
}

TEST(MemoryRoom, ARanksOwnStateHasALimit) {
  const FileDescriptor shared = StateMemory::make();
  MappedSlots memory(shared.get());
  const MemoryMachines machines({0}, 0);
  MemoryRoom room(memory, 0, machines);
  EXPECT_THROW(room.open_own(StateMemory::kOwnBytes + 1), LimitError);
}

}  // namespace
}  // namespace lockstep::memory_room_test
