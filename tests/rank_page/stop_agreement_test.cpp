#include "rank_page/stop_agreement.h"

#include <gtest/gtest.h>

#include <random>
#include <thread>

namespace lockstep {
namespace {

TEST(StopAgreement, NobodyStopsUnasked) {
  const RankBoard board(2);
  StopAgreement agreement(board, board.page(0));
  for (int call = 0; call < 10; ++call) EXPECT_FALSE(agreement.should_stop());
  EXPECT_EQ(board.head().stop_at.load(), 0U);
}

TEST(StopAgreement, ARankAloneStopsAtItsNextCall) {
  const RankBoard board(1);
  StopAgreement agreement(board, board.page(0));
  EXPECT_FALSE(agreement.should_stop());
  StopAgreement::ask(board);
  agreement.should_stop();
  EXPECT_TRUE(agreement.should_stop());
}

TEST(StopAgreement, TheFurthestRankDecides) {
  const RankBoard board(2);
  StopAgreement fast(board, board.page(0)), slow(board, board.page(1));
  for (int call = 1; call <= 5; ++call) fast.should_stop();
  slow.should_stop();
  StopAgreement::ask(board);
  EXPECT_FALSE(slow.should_stop());  // 2: it decides
  EXPECT_EQ(board.head().stop_at.load(), 6U);
  for (int call = 3; call <= 5; ++call) EXPECT_FALSE(slow.should_stop());
  EXPECT_TRUE(slow.should_stop());
  EXPECT_TRUE(fast.should_stop());
}

/// Ranks that run as fast as they can, none more than `lead` (from 1 on) steps ahead, asked at a random moment.
void race(int ranks, int lead, unsigned seed) {
  const RankBoard board(ranks);
  std::vector<std::atomic<int>> steps(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  std::atomic<bool> go{false};
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      StopAgreement agreement(board, board.page(rank));
      auto& mine = steps[static_cast<size_t>(rank)];
      while (!go.load()) std::this_thread::yield();
      for (int step = 0;; ++step) {
        // As if a collective held them together.
        for (const auto& other : steps)
          while (other.load() >= 0 && other.load() < step - lead) std::this_thread::yield();
        if (agreement.should_stop()) {
          mine.store(-1 - step);
          return;
        }
        mine.store(step);
      }
    });
  std::mt19937 random(seed);
  go = true;
  std::this_thread::sleep_for(std::chrono::microseconds(std::uniform_int_distribution<>(0, 500)(random)));
  StopAgreement::ask(board);
  for (auto& thread : threads) thread.join();
  for (const auto& step : steps) EXPECT_EQ(step.load(), steps[0].load()) << ranks << " ranks, seed " << seed;
}

TEST(StopAgreement, AllStopAtTheSameCallWhateverTheTiming) {
  for (unsigned seed = 0; seed < 60; ++seed)
    for (const int ranks : {2, 3, 5}) race(ranks, 1 + static_cast<int>(seed % 3), seed);
}

}  // namespace
}  // namespace lockstep
