#include "base/process_search.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>

namespace lockstep {
namespace {

std::string new_mark() {
  static int made = 0;
  return "LOCKSTEP_TEST_MARK=process_search." + std::to_string(::getpid()) + "." + std::to_string(++made);
}

/// Runs a shell's commands with this one variable and PATH. Returns once the shell has ended.
void run_shell(const std::string& commands, const std::string& variable) {
  std::string mark = variable, path = "PATH=/usr/bin:/bin";
  const std::array<char*, 3> environment = {mark.data(), path.data(), nullptr};
  const pid_t shell = ::fork();
  if (shell == 0) {
    ::execle("/bin/sh", "sh", "-c", commands.c_str(), nullptr, environment.data());
    ::_exit(127);
  }
  int status = 0;
  ::waitpid(shell, &status, 0);
  ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void end_all(const std::vector<pid_t>& processes) {
  for (const pid_t pid : processes) {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);  // an orphan has come to this process
  }
}

TEST(ProcessSearch, FindsAProcessThatIsInTheMiddleOfAnExec) {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  for (int round = 0; round < 200; ++round) {
    const std::string mark = new_mark();
    run_shell("setsid sleep 60 >/dev/null 2>&1 & exit 0", mark);
    const auto found = processes_with(mark);
    EXPECT_EQ(found.size(), 1U) << "in round " << round;
    end_all(found.empty() ? processes_with(mark) : found);
  }
}

/// A process that does nothing but replace itself is found whenever one looks. With `more` in its environment, before
/// the mark, that is read in pieces, and an exec may come between two.
void find_restless_process(const std::string& more) {
  const std::string mark = new_mark();
  std::string variable = mark, path = "PATH=/usr/bin:/bin", script = "exec /bin/sh -c \"$AGAIN\"",
              again = "AGAIN=" + script;
  std::string before = more;
  const std::array<char*, 5> environment = {before.data(), variable.data(), path.data(), again.data(), nullptr};
  const pid_t restless = ::fork();
  if (restless == 0) {
    ::execle("/bin/sh", "sh", "-c", script.c_str(), nullptr, environment.data());
    ::_exit(127);
  }
  while (processes_with(mark).empty()) continue;
  for (int round = 0; round < 1000; ++round) {
    ASSERT_EQ(processes_with(mark), std::vector<pid_t>{restless}) << "in round " << round;
    ASSERT_TRUE(was_started_with(restless, "LOCKSTEP_TEST_MARK")) << "in round " << round;
  }
  EXPECT_FALSE(was_started_with(restless, "LOCKSTEP_TEST_MAR"));
  end_all({restless});
}

TEST(ProcessSearch, FindsAProcessThatExecsWithoutEnd) { find_restless_process("MORE="); }

TEST(ProcessSearch, FindsAProcessOfALongEnvironmentThatExecsWithoutEnd) {
  find_restless_process("MORE=" + std::string(20'000, 'x'));
}

TEST(ProcessSearch, AWholeVariableOfALivingProcess) {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  const std::string mark = new_mark();
  run_shell("sleep 60 >/dev/null 2>&1 & setsid sleep 60 >/dev/null 2>&1 & exit 0", mark);
  const auto found = processes_with(mark);
  EXPECT_EQ(found.size(), 2U);
  EXPECT_TRUE(processes_with(mark + "0").empty());
  EXPECT_TRUE(processes_with(mark.substr(0, mark.size() - 1)).empty());
  EXPECT_TRUE(processes_with(mark.substr(1)).empty());
  for (const pid_t pid : found) ::kill(pid, SIGKILL);
  siginfo_t ended{};
  for (const pid_t pid : found) ::waitid(P_PID, static_cast<id_t>(pid), &ended, WEXITED | WNOWAIT);
  EXPECT_TRUE(processes_with(mark).empty()) << "zombies are not alive";
  end_all(found);
}

/// One that has no environment by its own wish is not waited for.
TEST(ProcessSearch, IsNotHeldUpByAnEmptyEnvironment) {
  const pid_t bare = ::fork();
  if (bare == 0) {
    const std::array<char*, 1> nothing = {nullptr};
    ::execle("/bin/sleep", "sleep", "60", nullptr, nothing.data());
    ::_exit(127);
  }
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(processes_with(new_mark(), std::chrono::seconds(20)).empty());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  end_all({bare});
}

TEST(ProcessSearch, AllProcesses) {
  const auto processes = all_processes();
  EXPECT_TRUE(std::is_sorted(processes.begin(), processes.end()));
  EXPECT_TRUE(std::binary_search(processes.begin(), processes.end(), ::getpid()));
}

}  // namespace
}  // namespace lockstep
