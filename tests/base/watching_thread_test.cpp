#include "base/watching_thread.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>

#include "base/clock.h"

namespace lockstep::watching_thread_test {
namespace {

using std::chrono::milliseconds;

void wait_for(const std::atomic<int>& count, int least) {
  for (const Deadline deadline(milliseconds(10'000)); count < least && !deadline.passed();)
    std::this_thread::sleep_for(milliseconds(1));
  EXPECT_GE(count, least);
}

TEST(WatchingThread, LooksUntilItIsStopped) {
  std::atomic<int> looks{0};
  WatchingThread thread;
  EXPECT_FALSE(thread.is_ours());
  thread.start(milliseconds(1), [&] { return ++looks > 0; });
  EXPECT_TRUE(thread.is_ours());
  wait_for(looks, 3);
  thread.stop();
  const int before = looks;
  std::this_thread::sleep_for(milliseconds(30));
  EXPECT_EQ(looks, before);
  thread.stop();
}

TEST(WatchingThread, DoesNotWaitForItsPauseToEnd) {
  const auto start = Clock::now();
  {
    WatchingThread thread;
    thread.start(std::chrono::hours(1), [] { return true; });
  }
  EXPECT_LT(seconds_since(start), 10);
}

TEST(WatchingThread, EndsWhereNothingIsLeftToLookAt) {
  for (const bool throws : {false, true}) {
    std::atomic<int> looks{0};
    WatchingThread thread;
    thread.start(milliseconds(1), [&]() -> bool {
      ++looks;
      if (throws) throw std::runtime_error("the store is gone");
      return false;
    });
    wait_for(looks, 1);
    std::this_thread::sleep_for(milliseconds(30));
    EXPECT_EQ(looks, 1);
  }
}

TEST(WatchingThread, IsNotThereInAForkedChild) {
  WatchingThread thread;
  thread.start(milliseconds(1), [] { return true; });
  const pid_t child = ::fork();
  if (child == 0) {
    const bool ours = thread.is_ours();
    thread.stop();
    ::_exit(ours ? 1 : 0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace lockstep::watching_thread_test
