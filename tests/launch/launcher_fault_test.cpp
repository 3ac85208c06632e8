#include <gtest/gtest.h>
#include <signal.h>

#include <sstream>
#include <thread>

#include "base/proc_file.h"
#include "base/process_search.h"
#include "launch/launched.h"

// A rank fails, the user interrupts, the launcher is killed: which rank is named, and that nothing is left.

namespace lockstep {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kSoon(1000);

bool all_gone(const Launched& run, milliseconds timeout = kSoon) {
  return eventually([&] { return run.processes().empty(); }, timeout);
}

std::string describe(const Launched& run) {
  std::string text;
  for (const pid_t pid : run.processes()) {
    const std::string folder = "/proc/" + std::to_string(pid) + "/";
    text += read_file(folder + "cmdline") + ": " + read_file(folder + "stat");
  }
  return text;
}

TEST(LauncherFault, AFailureStopsAllAndIsReported) {
  for (const int ranks : {2, 3}) {
    Launched run({"-n", std::to_string(ranks), "--run-dir", "run", "sh", "-c",
                  "if [ $RANK = 1 ]; then seq 30; exit 3; fi; exec sleep 60"});
    const auto result = run.wait();
    EXPECT_EQ(result.exit_code, 40);
    EXPECT_LT(result.seconds, 1);
    EXPECT_TRUE(contains(result.err, "rank 1 of " + std::to_string(ranks) + " failed first: exit code 3"))
        << result.err;
    EXPECT_TRUE(contains(result.err, "last 20 lines:\n  | 11\n")) << result.err;
    EXPECT_TRUE(contains(result.err, "  | 30\nlockstep: ends")) << result.err;
    EXPECT_TRUE(contains(result.err, (run.folder() / "run/rank_1.log").string())) << result.err;
    EXPECT_TRUE(run.processes().empty());
  }
}

TEST(LauncherFault, AKilledRankIsNamedWithItsSignal) {
  for (const auto& [name, text] : {std::pair{"KILL", "SIGKILL (Killed)"}, {"SEGV", "SIGSEGV"}, {"ABRT", "SIGABRT"}}) {
    Launched run(
        {"-n", "3", "sh", "-c", std::string("if [ $RANK = 2 ]; then kill -") + name + " $$; fi; exec sleep 60"});
    const auto result = run.wait();
    EXPECT_EQ(result.exit_code, 41);
    EXPECT_TRUE(contains(result.err, std::string("rank 2 of 3 failed first: killed by ") + text)) << result.err;
    EXPECT_TRUE(run.processes().empty());
  }
}

TEST(LauncherFault, VictimsAreNotBlamed) {
  // The others notice that the culprit is gone and fail as well, after it and with other codes.
  Launched run({"-n", "3", "sh", "-c",
                "if [ $RANK = 2 ]; then touch culprit; kill -KILL $$; fi; "
                "while [ ! -e culprit ]; do sleep 0.01; done; sleep 0.05; echo connection closed; exit 9"});
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 41);
  EXPECT_TRUE(contains(result.err, "rank 2 of 3 failed first: killed by SIGKILL")) << result.err;
}

/// Of every start, of a run that is well and of one that fails, and of a launcher inside another.
TEST(LauncherFault, WhatHasLeftTheSessionIsEndedWithTheRun) {
  const std::string leaves = "setsid sleep 60 >/dev/null 2>&1 & setsid setsid sleep 61 >/dev/null 2>&1 & ";
  struct Case {
    std::vector<std::string> arguments;
    int code;
  };
  const std::string inner = LOCKSTEP_BIN_DIR "/lockstep run -n 1 --run-dir inner_$RANK sh -c '" + leaves + "exit 0'; ";
  for (const auto& [arguments, code] :
       {Case{{"-n", "2", "sh", "-c", leaves + "exit 0"}, 0}, Case{{"-n", "2", "sh", "-c", leaves + "exit 3"}, 40},
        Case{{"-n", "2", "sh", "-c", inner + leaves + "exit 0"}, 0},
        Case{{"-n", "1", "--max-restarts", "2", "sh", "-c",
              leaves + "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && kill -KILL $$; exit 0"},
             0}}) {
    Launched run(arguments);
    const auto result = run.wait();
    EXPECT_EQ(result.exit_code, code) << result.err;
    EXPECT_TRUE(run.processes().empty()) << describe(run);
  }
}

TEST(LauncherFault, WhatWasEndedWithAStartIsNoZombieOfTheNext) {
  Launched run({"-n", "2", "--max-restarts", "3", "sh", "-c",
                "setsid sleep 60 >/dev/null 2>&1 & [ $TORCHELASTIC_RESTART_COUNT = 3 ] || kill -KILL $$; "
                "echo re\"\"ady; sleep 60"});
  ASSERT_TRUE(run.wait_for("ready"));
  int children = 0;
  for (const pid_t pid : all_processes()) {
    std::istringstream stat(process_stat(pid));
    std::string state;
    pid_t parent = 0;
    stat >> state >> parent;
    if (parent != run.pid()) continue;
    ++children;
    EXPECT_NE(state, "Z") << pid;
  }
  EXPECT_GE(children, 3) << "the ranks and the guard";
}

TEST(LauncherFault, WhatHasLeftTheSessionEndsWithTheLauncher) {
  Launched run({"-n", "2", "sh", "-c", "setsid sleep 60 >/dev/null 2>&1 & echo ready; sleep 60"});
  ASSERT_TRUE(run.wait_for("ready"));
  ::kill(run.pid(), SIGKILL);
  run.wait();
  EXPECT_TRUE(all_gone(run)) << describe(run);
}

TEST(LauncherFault, AGuardThatWasKilledIsReplacedByTheNextStart) {
  Launched run(
      {"-n", "2", "--max-restarts", "1", "sh", "-c",
       "[ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0; [ $RANK = 0 ] || exec sleep 60; for p in /proc/[0-9]*; do "
       "[ \"$(cat $p/comm 2>/dev/null)\" = lockstep-guard ] && [ \"$(awk '{print $4}' $p/stat)\" = $PPID ] && "
       "kill -KILL ${p#/proc/} && echo killed the guard; done; kill -KILL $$"});
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(contains(result.out, "killed the guard")) << result.out;
  EXPECT_TRUE(run.processes().empty()) << describe(run);
}

TEST(LauncherFault, AnotherRunsProcessesAreLeftAlone) {
  Launched other({"-n", "2", "sh", "-c", "setsid sleep 60 >/dev/null 2>&1 & echo ready; sleep 60"});
  ASSERT_TRUE(other.wait_for("ready"));
  const size_t before = other.processes().size();
  EXPECT_EQ(Launched({"-n", "2", "sh", "-c", "setsid sleep 60 >/dev/null 2>&1 & exit 0"}).wait().exit_code, 0);
  EXPECT_GE(other.processes().size(), before);  // its second rank may have begun later
}

TEST(LauncherFault, AnIgnoredSigchldHidesNoEnd) {
  Launched run({"-n", "2", "sh", "-c", "[ $RANK = 0 ] || exit 3; exec sleep 60"}, {.before = "trap '' CHLD"});
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 40);
  EXPECT_TRUE(contains(result.err, "rank 1 of 2 failed first: exit code 3")) << result.err;
}

TEST(LauncherFault, AStoppedRankIsStoppedToo) {
  Launched run({"-n", "2", "sh", "-c", "if [ $RANK = 1 ]; then kill -STOP $$; fi; sleep 0.1; exit 1"});
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 40);
  EXPECT_LT(result.seconds, 2);
}

TEST(LauncherFault, ARankThatDoesNotStopIsKilledAfterTheGrace) {
  Launched run(
      {"-n", "2", "sh", "-c", "if [ $RANK = 0 ]; then sleep 0.1; exit 1; fi; trap '' TERM; sleep 60; sleep 60"});
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 40);
  EXPECT_GE(result.seconds, 5);
  EXPECT_LT(result.seconds, 8);
  EXPECT_TRUE(contains(result.err, "killed    rank 1, which did not stop")) << result.err;
  EXPECT_TRUE(run.processes().empty());
}

TEST(LauncherFault, InterruptsLeaveNothing) {
  for (const auto& [signal, code] : {std::pair{SIGINT, 130}, {SIGTERM, 61}, {SIGUSR1, 61}, {SIGHUP, 129}}) {
    Launched run({"-n", "2", "sh", "-c", "sleep 60 & echo ready; wait"});
    ASSERT_TRUE(run.wait_for("ready"));
    ::kill(run.pid(), signal);
    const auto result = run.wait();
    EXPECT_EQ(result.exit_code, code);
    EXPECT_LT(result.seconds, 3);
    EXPECT_FALSE(contains(result.err, "failed")) << result.err;
    EXPECT_TRUE(run.processes().empty());
  }
}

TEST(LauncherFault, RanksMayEndInOrderAfterAnInterrupt) {
  Launched run({"-n", "2", "--run-dir", "run", "sh", "-c",
                "trap 'echo saved; exit 0' INT; echo ready; while :; do sleep 0.01; done"});
  ASSERT_TRUE(run.wait_for("ready"));
  ASSERT_TRUE(eventually([&] { return contains(run.log(1), "ready"); }));
  ::kill(run.pid(), SIGINT);
  EXPECT_EQ(run.wait().exit_code, 130);
  EXPECT_EQ(run.log(0), "ready\nsaved\n");
  EXPECT_EQ(run.log(1), "ready\nsaved\n");
}

TEST(LauncherFault, CtrlCOnATerminal) {
  Launched run({"-n", "2", "sh", "-c", "echo ready; sleep 60; sleep 60"}, {.terminal = true});
  ASSERT_TRUE(run.wait_for("ready"));
  run.type("\x03");
  EXPECT_EQ(run.wait().exit_code, 130);
  EXPECT_TRUE(run.processes().empty());
}

TEST(LauncherFault, ASecondSignalKillsAtOnce) {
  Launched run({"-n", "2", "sh", "-c", "trap '' INT TERM; echo ready; sleep 60; sleep 60"});
  ASSERT_TRUE(run.wait_for("ready"));
  ::kill(run.pid(), SIGINT);
  ASSERT_TRUE(run.wait_for("stopping the ranks"));
  ::kill(run.pid(), SIGINT);
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 130);
  EXPECT_LT(result.seconds, 3);
  EXPECT_TRUE(contains(result.err, "did not stop when asked to")) << result.err;
  EXPECT_TRUE(run.processes().empty());
}

TEST(LauncherFault, NohupHolds) {
  Launched run({"-n", "2", "sh", "-c", "echo ready; sleep 0.3; echo end"}, {.before = "trap '' HUP"});
  ASSERT_TRUE(run.wait_for("ready"));
  ::kill(run.pid(), SIGHUP);
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "ready\nend\n");
}

TEST(LauncherFault, AKilledLauncherLeavesNothing) {
  for (int round = 0; round < 10; ++round) {
    Launched run({"-n", "3", "sh", "-c", "sleep 60 & echo ready; wait"});
    if (round % 2 == 0)
      ASSERT_TRUE(run.wait_for("ready"));
    else  // somewhere in its start
      std::this_thread::sleep_for(std::chrono::microseconds(400 * round));
    ::kill(run.pid(), SIGKILL);
    EXPECT_EQ(run.wait().exit_code, -SIGKILL);
    EXPECT_TRUE(all_gone(run)) << describe(run);
  }
}

TEST(LauncherFault, WhatARankLeavesInItsGroupGoesWithTheRun) {
  Launched run({"-n", "2", "sh", "-c", "sleep 60 & exit 0"});
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_LT(result.seconds, 3);
  EXPECT_TRUE(all_gone(run));
}

TEST(LauncherFault, GarbageInTheStoreHarmsNobodyElse) {
  Launched run({"-n", "2", "bash", "-c",
                "if [ $RANK = 1 ]; then printf '\\377\\377\\377\\377' >&$LOCKSTEP_STORE_FD; fi; sleep 0.2; echo fine"});
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "fine\n");
  EXPECT_TRUE(contains(result.err, "rank 1 lost its connection to the key-value store")) << result.err;
}

}  // namespace
}  // namespace lockstep
