#include "base/library_thread.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include <gtest/gtest.h>

#include "base/thread_token.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

/// Whether another thread may act once it has had the time to come where it stays.
bool may_act() {
  std::this_thread::sleep_for(milliseconds(300));
  return another_thread_may_act(thread_number());
}

TEST(OtherThreads, OfAProcessWithoutThemDoNotAct) { EXPECT_FALSE(may_act()); }

TEST(OtherThreads, ActIfTheySleepForAWhileOrComputeOrWaitForInput) {
  std::atomic<bool> stops = false;
  std::thread sleeper([&] {
    while (!stops) std::this_thread::sleep_for(milliseconds(700));
  });
  EXPECT_TRUE(may_act());
  stops = true;
  sleeper.join();
  EXPECT_FALSE(may_act());

  stops = false;
  std::thread computer([&] {
    while (!stops) continue;
  });
  EXPECT_TRUE(may_act());
  stops = true;
  computer.join();

  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  std::thread reader([&] {
    char byte = 0;
    while (::read(ends[0], &byte, 1) > 0) continue;
  });
  EXPECT_TRUE(may_act());
  ::close(ends[1]);
  reader.join();
  ::close(ends[0]);
}

/// A thread that waits until this object goes.
class Waiting {
 public:
  explicit Waiting(bool for_a_while) {
    thread_ = std::thread([this, for_a_while] {
      std::unique_lock lock(mutex_);
      while (!ends_)
        if (for_a_while)
          ended_.wait_for(lock, std::chrono::hours(1));
        else
          ended_.wait(lock);
    });
  }
  ~Waiting() {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    ended_.notify_all();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  bool ends_ = false;
  std::thread thread_;
};

TEST(OtherThreads, DoNotActIfOnlyThisProcessCanWakeThem) {
  const Waiting waiting(/*for_a_while=*/false);
  std::thread joins([] { const Waiting another(false); });
  joins.join();
  EXPECT_FALSE(may_act());
  const Waiting limited(/*for_a_while=*/true);
  EXPECT_TRUE(may_act());
}

TEST(OtherThreads, OfThisLibraryDoNotCount) {
  std::atomic<bool> stops = false;
  const auto sleep = [&] {
    while (!stops) std::this_thread::sleep_for(milliseconds(20));
  };
  std::thread own = library_thread(sleep);
  EXPECT_FALSE(may_act());
  std::thread engine;
  {
    const AdoptsNewThreads adopted;
    engine = std::thread(sleep);
  }
  EXPECT_FALSE(may_act());
  std::thread other(sleep);
  EXPECT_TRUE(may_act());
  stops = true;
  for (std::thread* thread : {&own, &engine, &other}) thread->join();
}

}  // namespace
}  // namespace lockstep
