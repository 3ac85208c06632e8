#include "data/prefetcher.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <set>
#include <stdexcept>

namespace lockstep {
namespace {

TEST(Prefetcher, OrderDoesNotDependOnTheWorkers) {
  for (int workers : {0, 1, 2, 4, 9}) {
    Prefetcher<int64_t> items(500, workers, 2 * workers, [](int64_t number) {
      if (number % 7 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
      return number * number;
    });
    for (int64_t number = 0; number < 500; ++number) {
      EXPECT_EQ(items.taken(), number);
      ASSERT_EQ(items.take(), number * number) << workers << " workers";
    }
  }
}

TEST(Prefetcher, StaysWithinItsBound) {
  std::atomic<int64_t> made{0};
  Prefetcher<int64_t> items(1000, 3, 6, [&](int64_t number) {
    ++made;
    return number;
  });
  for (int64_t number = 0; number < 1000; ++number) {
    EXPECT_LE(made.load(), number + 6);
    items.take();
  }
  EXPECT_EQ(made.load(), 1000);
}

TEST(Prefetcher, WorksAheadOfTheConsumer) {
  std::atomic<int64_t> made{0};
  Prefetcher<int64_t> items(10, 2, 4, [&](int64_t number) {
    ++made;
    return number;
  });
  // Nothing is taken; a deadline far beyond what four increments need.
  for (int i = 0; i < 5000 && made.load() < 4; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(made.load(), 4);
}

TEST(Prefetcher, RunsOnWorkersOnly) {
  std::mutex mutex;
  std::set<std::thread::id> threads;
  Prefetcher<int> items(50, 2, 4, [&](int64_t) {
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
    return 0;
  });
  for (int i = 0; i < 50; ++i) items.take();
  EXPECT_FALSE(threads.contains(std::this_thread::get_id()));
  EXPECT_LE(threads.size(), 2u);
}

TEST(Prefetcher, LeavesEarlyWithoutWaitingForTheRest) {
  for (int taken : {0, 1, 5}) {
    std::atomic<int64_t> made{0};
    {
      Prefetcher<int64_t> items(1000000, 3, 6, [&](int64_t number) {
        ++made;
        return number;
      });
      for (int i = 0; i < taken; ++i) items.take();
    }
    EXPECT_LE(made.load(), taken + 6);
  }
}

TEST(Prefetcher, ThrowsInTurnAndGoesOn) {
  for (int workers : {0, 1, 3}) {
    Prefetcher<int64_t> items(20, workers, 2 * workers, [](int64_t number) {
      if (number == 7) throw std::out_of_range("seven");
      return number;
    });
    for (int64_t number = 0; number < 20; ++number) {
      if (number == 7)
        EXPECT_THROW(items.take(), std::out_of_range);
      else
        EXPECT_EQ(items.take(), number);
    }
  }
}

TEST(Prefetcher, NothingToMake) {
  Prefetcher<int> items(0, 2, 4, [](int64_t) -> int { throw std::logic_error("called"); });
  EXPECT_EQ(items.count(), 0);
}

}  // namespace
}  // namespace lockstep
