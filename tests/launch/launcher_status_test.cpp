#include <gtest/gtest.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#include <array>
#include <fstream>

#include "launch/launched.h"
#include "launch/run_record.h"

// `lockstep status` and `lockstep stacks` find a run by its folder and tell what its ranks do.

namespace lockstep {
namespace {

struct Said {
  int exit_code = -1;
  std::string text;
};

Said ask(const std::string& command, const std::filesystem::path& folder) {
  const std::string line = std::string(LOCKSTEP_BIN_DIR "/lockstep ") + command + " " + folder.string() + " 2>&1";
  FILE* pipe = ::popen(line.c_str(), "r");
  Said said;
  std::array<char, 4096> piece{};
  for (size_t count; (count = ::fread(piece.data(), 1, piece.size(), pipe)) > 0;) said.text.append(piece.data(), count);
  const int status = ::pclose(pipe);
  said.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return said;
}

TEST(LauncherStatus, TellsWhatEveryRankDoes) {
  Launched run({"-n", "2", "--run-dir", "run", LOCKSTEP_BIN_DIR "/page_rank", "join", "start=12", "sleep=60000"});
  ASSERT_TRUE(eventually([&] {
    const std::string text = ask("status", run.folder() / "run").text;
    const size_t first = text.find(" sleeping  step 0, in all_reduce");  // both ranks, at different times
    return first != std::string::npos && text.find(" sleeping  step 0, in all_reduce", first + 1) != std::string::npos;
  })) << ask("status", run.folder() / "run").text;
  const auto record = RunRecord::read((run.folder() / "run").string());
  ASSERT_EQ(record.ranks.size(), 2u);
  EXPECT_EQ(record.launcher.pid, run.pid());
  auto said = ask("status", run.folder() / "run");
  EXPECT_EQ(said.exit_code, 0);
  EXPECT_TRUE(contains(said.text, "launcher " + std::to_string(run.pid()) + ", 2 ranks\n")) << said.text;
  for (const int rank : {0, 1})
    EXPECT_TRUE(contains(said.text, "rank " + std::to_string(rank) + "  process " +
                                        std::to_string(record.ranks[static_cast<size_t>(rank)].pid) +
                                        " sleeping  step 0"))
        << said.text;
  EXPECT_TRUE(contains(said.text, "(Float [64, 10]) for ")) << said.text;
  ::kill(record.ranks[1].pid, SIGSTOP);
  EXPECT_TRUE(eventually([&] { return contains(ask("status", run.folder() / "run").text, " STOPPED "); }));
  ::kill(record.ranks[1].pid, SIGCONT);
  ::kill(run.pid(), SIGINT);
  run.wait();
  EXPECT_FALSE(std::filesystem::exists(run.folder() / "run/run.json"));
}

TEST(LauncherStatus, KnowsNothingOfOtherPrograms) {
  Launched run({"-n", "2", "--run-dir", "run", "sh", "-c", "echo ready; sleep 60"});
  ASSERT_TRUE(run.wait_for("ready"));
  const auto said = ask("status", run.folder() / "run");
  EXPECT_EQ(said.exit_code, 0);
  EXPECT_TRUE(contains(said.text, "has not joined")) << said.text;
}

TEST(LauncherStatus, ARunThatIsOverIsNoRun) {
  TemporaryFolder folder;
  auto said = ask("status", folder.path());
  EXPECT_EQ(said.exit_code, 49);
  EXPECT_TRUE(contains(said.text, "no run is active")) << said.text;
  // Left by a launcher that was killed; its pid now means another process, this one.
  ProcessIdentity other = identify(::getpid());
  EXPECT_TRUE(is_there(other));
  other.start_ticks += 1;
  const RunRecord record(folder.path().string(), {.launcher = other, .board_fd = 5, .ranks = {other}});
  said = ask("status", folder.path());
  EXPECT_EQ(said.exit_code, 49);
  EXPECT_TRUE(contains(said.text, "has ended: its launcher")) << said.text;
  std::ofstream(folder.path() / "run.json") << "{\"launcher\": 5}";
  said = ask("stacks", folder.path());
  EXPECT_EQ(said.exit_code, 49);
  EXPECT_TRUE(contains(said.text, "is not what `lockstep run` writes")) << said.text;
}

TEST(LauncherStatus, ShowsStacks) {
  Launched run({"-n", "1", "--run-dir", "run", LOCKSTEP_BIN_DIR "/page_rank", "join", "sleep=60000"});
  ASSERT_TRUE(eventually([&] { return contains(ask("status", run.folder() / "run").text, "step 0"); }));
  const auto said = ask("stacks", run.folder() / "run");
  if (contains(said.text, "neither gdb nor eu-stack")) GTEST_SKIP() << "no gdb: apt-get install gdb";
  if (contains(said.text, "does not permit")) GTEST_SKIP() << "ptrace is not permitted here";
  EXPECT_EQ(said.exit_code, 0) << said.text;
  EXPECT_TRUE(contains(said.text, "=== rank 0, process ")) << said.text;
  EXPECT_TRUE(contains(said.text, "nanosleep")) << said.text;
  EXPECT_FALSE(contains(ask("status", run.folder() / "run").text, "STOPPED")) << "it goes on";
}

}  // namespace
}  // namespace lockstep
