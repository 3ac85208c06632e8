#include "hosts/agent_process.h"

#include <gtest/gtest.h>

#include <signal.h>
#include <unistd.h>

#include <memory>

#include "base/clock.h"
#include "launch/launch_error.h"
#include "launch/launched.h"
#include "support/temporary_folder.h"

namespace lockstep::hosts {
namespace {

class AgentProcesses : public ::testing::Test {
 protected:
  /// `sh -c script`, as if it brought up an agent.
  std::unique_ptr<AgentProcess> started(const std::string& script) {
    return std::make_unique<AgentProcess>(std::vector<std::string>{"sh", "-c", script}, key_, EnvironmentBlock{},
                                          guard_, settings_);
  }

  static void turn_until_ended(AgentProcess& process) {
    for (const Deadline deadline(std::chrono::seconds(10)); !process.end() && !deadline.passed();) {
      PollSet polled;
      process.watch(polled);
      polled.wait(20);
    }
    process.read_output();
  }

  const Key key_ = Key::generate();
  const LauncherSettings settings_;
  const Guard guard_;
};

TEST_F(AgentProcesses, ReadsTheKeyAndWhatItPrintsIsKept) {
  const auto process = started("read key; echo first; echo \"$key\" >&2; exit 3");
  turn_until_ended(*process);
  ASSERT_TRUE(process->end());
  EXPECT_EQ(*process->end(), (ProcessEnd{ProcessEnd::Kind::kExited, 3}));
  EXPECT_EQ(process->last_line(), key_.text());
  EXPECT_EQ(process->output_fd(), -1);
  EXPECT_EQ(process->read_output(), "");
}

TEST_F(AgentProcesses, OneThatPrintsNothingHasNoLastLine) {
  const auto process = started("exit 0");
  turn_until_ended(*process);
  ASSERT_TRUE(process->end());
  EXPECT_FALSE(process->end()->failed());
  EXPECT_EQ(process->last_line(), "");
}

TEST_F(AgentProcesses, OneThatRunsIsKilledWithTheObject) {
  const TemporaryFolder folder;
  const std::string pid_file = folder.path().string() + "/pid";
  auto process = started("echo $$ > " + pid_file + "; echo up; exec sleep 60");
  std::string lines;
  for (const Deadline deadline(std::chrono::seconds(10)); lines.empty() && !deadline.passed(); ::usleep(1000))
    lines = process->read_output();
  EXPECT_EQ(lines, "up\n");
  EXPECT_FALSE(process->end());
  const pid_t pid = std::stoi(read_file(pid_file));
  EXPECT_EQ(::kill(pid, 0), 0);
  process.reset();
  EXPECT_NE(::kill(pid, 0), 0);
}

TEST_F(AgentProcesses, AProgramThatIsNotThereIsALaunchError) {
  EXPECT_THROW(AgentProcess({"no_such_program_here"}, key_, {}, guard_, settings_), LaunchError);
}

}  // namespace
}  // namespace lockstep::hosts
