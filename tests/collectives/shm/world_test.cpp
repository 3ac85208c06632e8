#include "collectives/shm/segment/world.h"

#include <gtest/gtest.h>

#include "base/clock.h"
#include "collectives/shm/local_world.h"

namespace lockstep::shm {
namespace {

class Processors : public ::testing::TestWithParam<int> {};

// A peer that had never waited was taken for one that waits on processor 0: a rank that ran there yielded to it for
// nothing.
TEST_P(Processors, OfARankThatHasNotWaitedAreNotProcessor0) {
  const auto worlds = local_worlds(small_geometry(GetParam()));
  const World& mine = worlds[0];
  for (uint32_t processor : {0u, 1u, kNoProcessor}) EXPECT_FALSE(mine.waits_on(processor, mine.others())) << processor;
  worlds[1].note_processor(0);
  EXPECT_TRUE(mine.waits_on(0, mine.others()));
  EXPECT_FALSE(mine.waits_on(0, mine.others() & ~mine.bit(1)));  // another rank is waited for
  EXPECT_FALSE(mine.waits_on(1, mine.others()));
  worlds[1].note_processor(kNoProcessor);  // where the system no longer tells
  EXPECT_FALSE(mine.waits_on(kNoProcessor, mine.others()));
}

TEST_P(Processors, AreNotedByARankThatWaits) {
  const int n = GetParam();
  auto worlds = local_worlds(small_geometry(n));
  Control& control = worlds[0].mine();
  on_threads(n, [&](int rank) {
    Communicator group(std::move(worlds[static_cast<size_t>(rank)]), std::make_shared<ProgressSet>());
    const auto start = Clock::now();
    while (rank != 0 && control.processor.load() == kNoProcessor && seconds_since(start) < 5) std::this_thread::yield();
    if (rank != 0) {
      EXPECT_NE(control.processor.load(), kNoProcessor);
    }
    group.run({.kind = OperationKind::kBarrier}, kTestTimeout);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Processors, ::testing::Values(2, 3));

}  // namespace
}  // namespace lockstep::shm
