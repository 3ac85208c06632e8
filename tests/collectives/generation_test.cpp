#include "collectives/shm/backend/c10d_meeting_store.h"

#include <gtest/gtest.h>

#include <set>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace lockstep::shm_engine {
namespace {

/// What each of these ranks got; a rank that is not among them has ended before it joined.
std::vector<Generation> meet(c10d::Store& store, const std::set<int>& ranks, int world_size,
                             std::chrono::milliseconds timeout) {
  std::vector<Generation> found(static_cast<size_t>(world_size));
  std::vector<std::thread> threads;
  for (const int rank : ranks)
    threads.emplace_back([&, rank] {
      // Not always in the same order.
      if ((rank + world_size) % 2 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      found[static_cast<size_t>(rank)] = agree_on_generation(store, rank, world_size, timeout);
    });
  for (auto& thread : threads) thread.join();
  return found;
}

// A rank of the previous start was taken for one of this start: its card was there, but no process.
TEST(Generation, IsOfTheRanksThatLiveWhateverEarlierOnesLeft) {
  for (const int size : {1, 2, 3}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::set<int> all;
    for (int rank = 0; rank < size; ++rank) all.insert(rank);
    std::set<std::string> prefixes;
    const auto all_meet = [&] {
      const auto found = meet(*store, all, size, std::chrono::seconds(20));
      for (const auto& generation : found) {
        EXPECT_TRUE(generation.missing.empty());
        EXPECT_EQ(generation.prefix, found[0].prefix);
      }
      EXPECT_TRUE(prefixes.insert(found[0].prefix).second) << found[0].prefix << " had been used before";
    };
    all_meet();
    all_meet();
    // Starts where one rank ends before it joins, and the others wherever they are then.
    for (const int absent : all) {
      std::set<int> others = all;
      others.erase(absent);
      for (const auto& generation : meet(*store, others, size, std::chrono::milliseconds(60)))
        prefixes.insert(generation.prefix);
      all_meet();
    }
  }
}

TEST(Generation, RanksThatWereGivenOtherWorldSizesAreToldBoth) {
  for (const int other : {2, 4}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::string> told(2);
    const auto join = [&](int rank, int size) {
      try {
        agree_on_generation(*store, rank, size, std::chrono::seconds(20));
      } catch (const Error& error) {
        told[static_cast<size_t>(rank)] = error.what();
      }
    };
    std::thread one([&] { join(1, other); });
    join(0, 3);
    one.join();
    const std::string text = "rank 0 was started as one of 3 ranks, rank 1 as one of " + std::to_string(other);
    for (const std::string& each : told) EXPECT_EQ(each.rfind(text, 0), 0U) << each;
  }
}

TEST(Generation, MissingRanksAreNamed) {
  using Ranks = std::vector<int>;
  auto store = c10::make_intrusive<c10d::HashStore>();
  const std::chrono::milliseconds timeout(60);
  const auto found = meet(*store, {0, 2}, 4, timeout);
  EXPECT_EQ(found[0].missing, (Ranks{1, 3}));
  EXPECT_EQ(found[2].missing, (Ranks{1, 3}));
  store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_EQ(meet(*store, {1, 2}, 4, timeout)[2].missing, (Ranks{0, 3}));
}

}  // namespace
}  // namespace lockstep::shm_engine
