#include "launch/process/process_table.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>

#include "launch/launched.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

TEST(ProcessTable, OfAGroup) {
  EXPECT_TRUE(group_lives(::getpgrp()));
  const pid_t child = ::fork();
  if (child == 0) {
    ::setpgid(0, 0);
    ::_exit(0);
  }
  siginfo_t ended{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT), 0);
  EXPECT_FALSE(group_lives(child)) << "only a zombie is in it";
  ::waitpid(child, nullptr, 0);
  EXPECT_FALSE(group_lives(child));
}

TEST(ProcessTable, HaveStates) {
  EXPECT_EQ(process_state(::getpid()), 'R');
  EXPECT_EQ(process_state(-1), '\0');
}

/// Computes until this process has used so much processor time.
void spin(milliseconds time = std::chrono::minutes(1)) {
  while (std::clock() * milliseconds(1000) < time * CLOCKS_PER_SEC) continue;
  ::_exit(0);
}

/// A child in its own process group, which is killed in the end.
class Child {
 public:
  template <typename Body>
  explicit Child(const Body& body) : pid_(::fork()) {
    if (pid_ == 0) {
      ::setpgid(0, 0);
      body();
      ::_exit(0);
    }
    ::setpgid(pid_, pid_);
  }
  ~Child() {
    ::kill(-pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  pid_t pid() const { return pid_; }

 private:
  const pid_t pid_;
};

TEST(ProcessTable, TimeOfAFamilyIsThatOfAllWhomItHasStarted) {
  const Child sleeps([] { ::pause(); });
  const Child itself([] { spin(); });
  const Child by_a_child_in_another_session([] {
    if (::fork() == 0) {
      ::setsid();
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // nobody is left in its group to be killed with it
      spin();
    }
    ::pause();
  });
  const Child by_one_that_has_ended([] {
    if (const pid_t child = ::fork(); child != 0)
      ::waitpid(child, nullptr, 0);
    else
      spin(milliseconds(200));
    ::pause();
  });
  const std::vector<ProcessFamily> families = {{.group = sleeps.pid()},
                                               {.group = itself.pid()},
                                               {.group = by_a_child_in_another_session.pid()},
                                               {.group = by_one_that_has_ended.pid()}};
  std::vector<Clock::duration> times;
  EXPECT_TRUE(eventually([&] {
    times = processor_times(families);
    return std::min({times[1], times[2], times[3]}) >= milliseconds(100);
  })) << "itself "
      << times[1] / milliseconds(1) << " ms, by a child in another session " << times[2] / milliseconds(1)
      << " ms, by one that has ended " << times[3] / milliseconds(1) << " ms";
  EXPECT_LE(times[0], milliseconds(20));
  const auto of_group = processor_times({{.group = -1, .member = itself.pid()}});
  EXPECT_GE(of_group[0], milliseconds(100)) << "also by a member alone";
}

}  // namespace
}  // namespace lockstep
