#include <gtest/gtest.h>
#include <signal.h>

#include <nlohmann/json.hpp>
#include <regex>
#include <thread>

#include "launch/launched.h"

// What the launcher learns from the ranks' pages: hangs, restarts, preemption, causes. The ranks are page_rank, which
// writes what a training would write.

namespace lockstep {
namespace {

std::vector<std::string> ranks(int count, std::vector<std::string> options, const std::vector<std::string>& words) {
  std::vector<std::string> arguments = {"-n", std::to_string(count), "--run-dir", "run"};
  arguments.insert(arguments.end(), options.begin(), options.end());
  arguments.push_back(LOCKSTEP_BIN_DIR "/page_rank");
  arguments.insert(arguments.end(), words.begin(), words.end());
  return arguments;
}

nlohmann::json report_of(const Launched& run) {
  return nlohmann::json::parse(read_file(run.folder() / "run/report.json"), nullptr, false);
}

TEST(LauncherPage, AHangIsEndedAndNamed) {
  for (const int count : {2, 3}) {
    Launched run(ranks(count, {"--hang-timeout", "2"},
                       {"join", "start=1", "finish=1", "1:sleep=60000", "start=2", "wait_for=1", "sleep=60000"}));
    const auto result = run.wait();
    EXPECT_EQ(result.exit_code, 43);
    EXPECT_LT(result.seconds, 6);
    EXPECT_TRUE(contains(result.err, "rank 1 of " + std::to_string(count) +
                                         " hangs: rank 1 has not reached all_reduce #2 (Float [64, 10])"))
        << result.err;
    EXPECT_TRUE(contains(result.err, "rank 0 waits in all_reduce #2 (Float [64, 10]) for rank 1")) << result.err;
    EXPECT_EQ(report_of(run)["exit_code"], 43);
    EXPECT_EQ(report_of(run)["culprit"]["last_collective"]["sequence"], 1);
    EXPECT_TRUE(run.processes().empty());
  }
}

TEST(LauncherPage, AStoppedRankIsNamed) {
  Launched run(ranks(2, {"--hang-timeout", "3"},
                     {"join", "start=1", "1:raise=" + std::to_string(SIGSTOP), "wait_for=1", "sleep=60000"}));
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 43);
  EXPECT_TRUE(contains(result.err, "rank 1 is STOPPED")) << result.err;
  EXPECT_TRUE(run.processes().empty());
}

TEST(LauncherPage, AVictimThatEndsFirstIsNotBlamed) {
  Launched run(ranks(3, {}, {"join", "0:victim_of=2", "0:exit=1", "2:sleep=100", "2:exit=7", "sleep=60000"}));
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 40);
  // It is asked to stop if it has not ended soon, as on a busy machine.
  EXPECT_TRUE(
      contains(result.err, "rank 2 of 3 failed first: exit code 7\n") ||
      contains(result.err, "rank 2 of 3 failed first: killed by SIGTERM (Terminated), after it was asked to stop"))
      << result.err;
  EXPECT_TRUE(contains(result.err, "known by  rank 0, which says: a peer is gone")) << result.err;
  const auto report = report_of(run);
  EXPECT_EQ(report["culprit"]["rank"], 2);
  EXPECT_EQ(report["how_known"]["rank"], 0);
}

TEST(LauncherPage, ARankThatEndsWellBeforeItJoinsIsNamed) {
  for (const char* before : {"1:sleep=0", "1:joining"}) {
    Launched run(ranks(3, {}, {before, "1:exit=0", "joining", "sleep=60000"}));
    const auto result = run.wait();
    EXPECT_EQ(result.exit_code, 46);
    EXPECT_LT(result.seconds, 3);
    EXPECT_TRUE(contains(result.err, "rank 1 of 3 ended with exit code 0 before it joined the others\n")) << result.err;
    EXPECT_TRUE(contains(result.err, "known by  rank 0, which says: it waits for all ranks to join\n")) << result.err;
    EXPECT_EQ(report_of(run)["exit_code"], 46);
    EXPECT_EQ(report_of(run)["culprit"]["end"]["value"], 0);
    EXPECT_TRUE(run.processes().empty());
  }
}

TEST(LauncherPage, RanksMayEndAtAnyTimeWhereNobodyMissesThem) {
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{"1:exit=0", "sleep=1500"},
                                             {"1:exit=0", "sleep=1500", "step"},
                                             {"1:leave_a_child=1700", "1:exit=0", "joining", "sleep=1500"}}) {
    Launched run(ranks(2, {}, words));
    const auto result = run.wait();
    EXPECT_EQ(result.exit_code, 0) << words[0] << result.err;
  }
}

TEST(LauncherPage, ACollectiveIsToldByWhatItIsFor) {
  Launched run(ranks(2, {}, {"join", "of_a_bucket", "start=912", "1:sleep=100", "1:exit=3", "sleep=60000"}));
  const auto result = run.wait();
  const std::string bucket = "bucket 1 of 2 (out.bias to out.weight)";
  EXPECT_TRUE(contains(result.err, "last did  all_reduce #912 (Float [64, 10]) of " + bucket + ", not finished\n"))
      << result.err;
  EXPECT_EQ(report_of(run)["culprit"]["last_collective"]["of"], bucket);
}

TEST(LauncherPage, ARankThatIsDoneTooEarlyDoesNotMatch) {
  Launched run(ranks(
      2, {}, {"join", "1:start=912", "1:finish=912", "1:leave", "1:exit=0", "sleep=50", "victim_of=1", "exit=1"}));
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 44);
  EXPECT_TRUE(contains(result.err, "rank 1 of 2 ended with exit code 0 while rank 0 needed it")) << result.err;
  EXPECT_TRUE(contains(result.err, "last did  all_reduce #912 (Float [64, 10]), finished")) << result.err;
}

TEST(LauncherPage, AnExceptionThatNobodyCatchesIsTold) {
  Launched run(ranks(2, {}, {"join", "1:throw", "sleep=60000"}));
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 40);
  EXPECT_TRUE(contains(result.err, "rank 1: threw: the words of the exception; stopping the other ranks\n"))
      << result.err;
  EXPECT_TRUE(contains(result.err, "rank 1 of 2 threw: the words of the exception\n")) << result.err;
  EXPECT_FALSE(contains(result.err, "SIGABRT")) << result.err;
  EXPECT_EQ(report_of(run)["culprit"]["what"], "the words of the exception");
  // In torchrun's form, for programs that read that.
  const auto file = nlohmann::json::parse(read_file(run.folder() / "run/rank_1_error.json"));
  EXPECT_EQ(file["message"]["message"], "the words of the exception");
}

TEST(LauncherPage, ARefusedInputHasItsCodeCaughtOrNot) {
  for (const auto& words : {std::vector<std::string>{"join", "1:refuse", "sleep=60000"},
                            {"join", "1:refuse_and_catch", "1:exit=1", "sleep=60000"}}) {
    Launched run(ranks(2, {}, words));
    const auto result = run.wait();
    EXPECT_EQ(result.exit_code, 49);
    const bool caught = words[1] != "1:refuse";
    EXPECT_TRUE(contains(result.err, caught ? "rank 1 of 2 failed first: exit code 1\n  what      the file is damaged\n"
                                            : "rank 1 of 2 threw: the file is damaged\n"))
        << result.err;
    EXPECT_EQ(report_of(run)["culprit"]["what"], "the file is damaged");
    EXPECT_EQ(report_of(run)["exit_code"], 49);
  }
  Launched goes_on(ranks(2, {}, {"join", "1:refuse_and_catch", "step", "1:exit=1", "sleep=60000"}));
  EXPECT_EQ(goes_on.wait().exit_code, 40) << "what ends it later has nothing to do with the file";
}

TEST(LauncherPage, RestartsAfterProgress) {
  Launched run(ranks(2, {"--max-restarts", "2"},
                     {"join", "step", "first:checkpoint=7", "first:say=1", "1:first:sleep=50", "1:first:exit=3",
                      "first:sleep=60000", "say=2", "leave"}));
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_TRUE(contains(result.err, "rank 1 of 2 failed first: exit code 3\n")) << result.err;
  EXPECT_TRUE(contains(result.err, "kept      step 7 in /run/step.pt")) << result.err;
  EXPECT_TRUE(contains(result.err, "restart 1 of 2\n")) << result.err;
  EXPECT_TRUE(contains(result.err, "succeeded after 1 restart\n")) << result.err;
  EXPECT_EQ(result.out, "at 1\nat 2\n");
  EXPECT_TRUE(contains(read_file(run.folder() / "run/restart_1.json"), "\"exit_code\": 40")) << "why it was restarted";
  EXPECT_FALSE(std::filesystem::exists(run.folder() / "run/report.json")) << "it has ended well";
  const std::string log = std::regex_replace(run.log(1), std::regex("(^|\n)[^ ]*Z "), "$1");
  EXPECT_EQ(log, "at 1\n--- lockstep: restart 1 ---\nat 2\n");
  EXPECT_TRUE(run.processes().empty());
}

TEST(LauncherPage, ASignalBetweenTwoStartsEndsTheRun) {
  // Killed from outside before it makes a step.
  Launched run({"--max-restarts", "9", "--run-dir", "run", LOCKSTEP_BIN_DIR "/page_rank", "join", "raise=9"});
  ASSERT_TRUE(run.wait_for("restart 6 of 9 in 1 s"));
  ::kill(run.pid(), SIGINT);
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 41);
  EXPECT_LT(result.seconds, 6);
  EXPECT_EQ(report_of(run)["exit_code"], 41);
  EXPECT_EQ(report_of(run)["restarts"], 5);
}

TEST(LauncherPage, ACrashLoopIsNotRestarted) {
  Launched run(ranks(2, {"--max-restarts", "100"}, {"join", "sleep=20", "exit=3"}));
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 40);
  EXPECT_LT(result.seconds, 2);
  EXPECT_TRUE(contains(result.err, "no restart: no step was completed since the last start")) << result.err;
}

TEST(LauncherPage, RanksKnowHowOftenTheyWereStarted) {
  Launched run(
      {"-n", "1", "--max-restarts", "4", "sh", "-c", "echo $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS"});
  EXPECT_EQ(run.wait().out, "0 of 4\n");
}

/// The number of steps that rank 0 says it made.
std::string left_after(const std::string& text) {
  std::smatch match;
  return std::regex_search(text, match, std::regex("left after (\\d+)")) ? match[1].str() : "?";
}

TEST(LauncherPage, PreemptionEndsAllRanksAfterTheSameStep) {
  for (const int number : {SIGTERM, SIGUSR1}) {
    Launched run(ranks(3, {}, {"join", "train", "leave"}));
    ASSERT_TRUE(run.wait_for("training"));
    ASSERT_TRUE(eventually([&] { return contains(run.log(1), "training") && contains(run.log(2), "training"); }));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    ::kill(run.pid(), number);
    const auto result = run.wait();
    EXPECT_EQ(result.exit_code, 60) << result.err;
    EXPECT_TRUE(contains(result.err, "in /run/step.pt")) << result.err;
    const std::string steps = left_after(run.log(0));
    EXPECT_NE(steps, "?");
    EXPECT_EQ(left_after(run.log(1)), steps);
    EXPECT_EQ(left_after(run.log(2)), steps);
    EXPECT_EQ(report_of(run)["exit_code"], 60);
    EXPECT_EQ(report_of(run)["state_kept"]["step"], std::stoi(steps));
  }
}

TEST(LauncherPage, LeavingWithoutSavingIs61) {
  Launched run(ranks(2, {}, {"join", "train_unsaved", "leave"}));
  ASSERT_TRUE(run.wait_for("training"));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  ::kill(run.pid(), SIGTERM);
  EXPECT_EQ(run.wait().exit_code, 61);
}

TEST(LauncherPage, ASecondSignalEndsTheSavingToo) {
  Launched run(ranks(2, {}, {"join", "train", "sleep=60000"}));
  ASSERT_TRUE(run.wait_for("training"));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  ::kill(run.pid(), SIGTERM);
  ASSERT_TRUE(run.wait_for("asked to save and leave"));
  ASSERT_TRUE(eventually([&] { return contains(run.log(0), "left after"); }));
  ::kill(run.pid(), SIGTERM);
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 61);
  EXPECT_LT(result.seconds, 5);
  EXPECT_TRUE(run.processes().empty());
}

}  // namespace
}  // namespace lockstep
