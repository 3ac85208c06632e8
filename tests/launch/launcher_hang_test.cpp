#include <gtest/gtest.h>
#include <signal.h>

#include <nlohmann/json.hpp>

#include "launch/launched.h"

// Tells a hang from long work of one rank. The ranks are page_rank, which writes what a training would
// write; all of them start a collective, into which rank 0 comes late or never.

namespace lockstep {
namespace {

/// `words` say what rank 0 does while the others wait.
Launched::Result while_others_wait(int count, const std::string& hang_timeout, std::vector<std::string> words,
                                   nlohmann::json* report = nullptr) {
  std::vector<std::string> arguments = {
      "-n",   std::to_string(count), "--run-dir", "run", "--hang-timeout", hang_timeout, LOCKSTEP_BIN_DIR "/page_rank",
      "join", "timeout_ms=1800000"};
  for (const std::string& word : words) arguments.push_back("0:" + word);
  for (const char* word : {"start=1", "wait_for=0", "0:finish=1", "0:leave", "0:exit=0", "sleep=300", "finish=1"})
    arguments.emplace_back(word);
  // The others wait while rank 0 lives.
  for (int rank = 1; rank < count; ++rank)
    arguments.insert(arguments.end() - 2, std::to_string(rank) + ":await_leave=0");
  Launched run(arguments);
  const auto result = run.wait();
  if (report != nullptr) *report = nlohmann::json::parse(read_file(run.folder() / "run/report.json"), nullptr, false);
  EXPECT_TRUE(run.processes().empty());
  return result;
}

TEST(LauncherHang, ARankThatComputesForLongIsSlowAndNoHang) {
  // This was 43 once --hang-timeout was over, whatever the rank did.
  for (const int count : {2, 3}) {
    const auto result = while_others_wait(count, "1", {"spin=4000"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_TRUE(contains(result.err,
                         "rank 0 computes and has not reached all_reduce #1 (Float [64, 10]); that is slow, "
                         "not a hang: the others wait for up to 1800 s"))
        << result.err;
    EXPECT_TRUE(contains(result.err, "rank 0 computes; its last one: none")) << result.err;
    EXPECT_TRUE(contains(result.err, "rank 1 waits in all_reduce #1 (Float [64, 10]) for rank 0")) << result.err;
  }
}

TEST(LauncherHang, ARankWhoseChildComputesIsNoHang) {
  const auto result = while_others_wait(2, "1", {"let_a_child_spin=3500"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
}

TEST(LauncherHang, ARankThatSaysThatItGoesOnIsNoHang) {
  const auto result = while_others_wait(3, "1", {"beat=3500"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_FALSE(contains(result.err, "no progress")) << result.err;
}

TEST(LauncherHang, ARankThatOnlySleepsIsOneAndTheBlockSaysWhatToRaise) {
  nlohmann::json report;
  const auto result = while_others_wait(2, "1", {"spin=1500", "sleep=60000"}, &report);
  EXPECT_EQ(result.exit_code, 43);
  EXPECT_LT(result.seconds, 7);
  const std::string advice =
      "if rank 0 works this long on purpose, let it call lockstep::heartbeat() regularly, or raise --hang-timeout "
      "(1.00 s); the others wait for at most ContextOptions::collective_timeout (1800.0 s)";
  EXPECT_TRUE(contains(result.err, "rank 0 of 2 hangs: rank 0 has not reached all_reduce #1")) << result.err;
  EXPECT_TRUE(contains(result.err, "advice    " + advice + "\n")) << result.err;
  EXPECT_EQ(report["advice"], advice);
}

TEST(LauncherHang, ARankThatHasBeatenAndThenHangsIsFound) {
  nlohmann::json report;
  const auto result = while_others_wait(3, "1", {"beat=500", "sleep=60000"}, &report);
  EXPECT_EQ(result.exit_code, 43);
  EXPECT_GE(report["ranks"][0]["heartbeats"].get<int>(), 3);
}

TEST(LauncherHang, ARankThatSpinsInAWaitForACollectiveDoesNotCompute) {
  const auto result = while_others_wait(2, "1", {"start=1", "waiting=1", "spin=60000"});
  EXPECT_EQ(result.exit_code, 43);
  EXPECT_LT(result.seconds, 6);
  EXPECT_TRUE(contains(result.err, "all ranks wait")) << result.err;
  EXPECT_FALSE(contains(result.err, "advice")) << "no patience helps: " << result.err;
}

TEST(LauncherHang, BesideARankThatComputesAStoppedOneIsStillFound) {
  Launched run({"-n", "3", "--run-dir", "run", "--hang-timeout", "2", LOCKSTEP_BIN_DIR "/page_rank", "join",
                "0:spin=60000", "start=1", "1:raise=" + std::to_string(SIGSTOP), "wait_for=1", "sleep=60000"});
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 43);
  EXPECT_LT(result.seconds, 6);
  EXPECT_TRUE(contains(result.err, "rank 1 of 3 hangs: rank 1 is STOPPED")) << result.err;
}

TEST(LauncherHang, ACollectiveWhoseTimeWasUpIs43CaughtOrNot) {
  // Rank 0 comes too late and learns that the others gave up; it does not matter whether the program catches that. This
  // was 40 if it did, and if rank 0 was the first to end.
  for (const char* first : {"0:sleep=50", "1:sleep=50"}) {
    Launched run({"-n", "2", "--run-dir", "run", LOCKSTEP_BIN_DIR "/page_rank", "join", "timeout_ms=5000", "start=1",
                  "give_up_on=0", "leave", first, "exit=1"});
    const auto result = run.wait();
    EXPECT_EQ(result.exit_code, 43) << result.err;
    EXPECT_TRUE(contains(result.err, "rank 0 of 2 hangs: ")) << result.err;
    EXPECT_TRUE(contains(result.err, "raise ContextOptions::collective_timeout (5.00 s)\n")) << result.err;
  }
}

TEST(LauncherHang, AnEndWithoutAnExceptionIsStillASignal) {
  Launched run({"-n", "2", "--run-dir", "run", LOCKSTEP_BIN_DIR "/page_rank", "join", "1:terminate", "sleep=60000"});
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 41);
  EXPECT_TRUE(contains(result.err, "rank 1 of 2 failed first: killed by SIGABRT")) << result.err;
  EXPECT_TRUE(contains(result.err, "what      std::terminate was called\n")) << result.err;
}

}  // namespace
}  // namespace lockstep
