#pragma once

#include <functional>
#include <string>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include <gtest/gtest.h>

#include "base/clock.h"
#include "support/ranks.h"
#include "support/told_in_time.h"

namespace lockstep::testing {

/// Expects that `body` never ends on any rank, and that each is told so within five seconds of its begin. Returns
/// what it was told.
inline std::string told_of_deadlock(const std::function<void()>& body, const std::string& what) {
  const auto start = Clock::now();
  std::string said = "nothing";
  try {
    body();
  } catch (const std::exception& error) {
    said = error.what();
  }
  expect_told_in_time(start, what);
  EXPECT_NE(said.find("wait for each other"), std::string::npos) << what << " says: " << said;
  return said;
}

/// Stops this process for a while, again and again. REQUIRES: it has one thread that forks.
class StoppedNowAndThen {
 public:
  StoppedNowAndThen(int times, std::chrono::milliseconds goes, std::chrono::milliseconds stands) {
    const pid_t self = ::getpid();
    helper_ = ::fork();
    if (helper_ != 0) return;
    for (int i = 0; i < times; ++i) {
      std::this_thread::sleep_for(goes);
      ::kill(self, SIGSTOP);
      std::this_thread::sleep_for(stands);
      ::kill(self, SIGCONT);
    }
    ::_exit(0);
  }
  ~StoppedNowAndThen() { ::waitpid(helper_, nullptr, 0); }
  StoppedNowAndThen(const StoppedNowAndThen&) = delete;

 private:
  pid_t helper_ = -1;
};

}  // namespace lockstep::testing
