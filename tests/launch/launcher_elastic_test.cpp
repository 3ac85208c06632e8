#include <gtest/gtest.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>

#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "launch/launched.h"
#include "launch/run_record.h"

// Runs that go on with another number of ranks, and `lockstep resize`.

namespace lockstep {
namespace {

constexpr const char* kRank = LOCKSTEP_BIN_DIR "/page_rank";

struct Answer {
  int exit_code = -1;
  std::string text;
};

Answer ask_about(const Launched& run, const std::string& command, const std::string& words = "") {
  const std::string line = std::string(LOCKSTEP_BIN_DIR "/lockstep ") + command + " " +
                           (run.folder() / "run").string() + " " + words + " 2>&1";
  FILE* pipe = ::popen(line.c_str(), "r");
  Answer said;
  std::array<char, 4096> piece{};
  for (size_t count; (count = ::fread(piece.data(), 1, piece.size(), pipe)) > 0;) said.text.append(piece.data(), count);
  const int status = ::pclose(pipe);
  said.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return said;
}

Answer resize(const Launched& run, const std::string& words) { return ask_about(run, "resize", words); }

std::vector<nlohmann::json> starts_of(const Launched& run) {
  std::istringstream lines(read_file(run.folder() / "run/starts.jsonl"));
  std::vector<nlohmann::json> starts;
  for (std::string line; std::getline(lines, line);) starts.push_back(nlohmann::json::parse(line));
  return starts;
}

TEST(LauncherElastic, ResizesARunThatGoesOn) {
  for (const auto& [from, to] : {std::pair{3, 2}, {2, 4}}) {
    Launched run({"-n", std::to_string(from), "--elastic", "2:4", "--run-dir", "run", "sh", "-c",
                  "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && exec " + std::string(kRank) +
                      " join train; echo rank $RANK of $WORLD_SIZE; exec " + kRank + " join sleep=300"});
    ASSERT_TRUE(run.wait_for("training"));
    const Answer said = resize(run, std::to_string(to));
    EXPECT_EQ(said.exit_code, 0) << said.text;
    EXPECT_EQ(said.text, "the run has " + std::to_string(to) + " ranks\n");
    const auto result = run.wait();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_TRUE(contains(result.err, "--elastic without virtual ranks")) << result.err;
    EXPECT_TRUE(contains(result.err, "goes on with " + std::to_string(to) + " ranks")) << result.err;
    EXPECT_FALSE(contains(result.err, "ended by")) << result.err;
    for (int rank = 0; rank < to; ++rank)
      EXPECT_TRUE(contains(run.log(rank), "rank " + std::to_string(rank) + " of " + std::to_string(to)));
    const auto starts = starts_of(run);
    ASSERT_EQ(starts.size(), 2U);
    EXPECT_EQ(starts[0]["ranks"], from);
    EXPECT_EQ(starts[0]["resized"], true);
    EXPECT_GT(starts[0]["steps"], 0);
    EXPECT_EQ(starts[1]["ranks"], to);
    EXPECT_EQ(starts[1]["exit_code"], 0);
  }
}

TEST(LauncherElastic, ManyStartsDoNotLetTheLauncherGrow) {
  Launched run({"-n", "1", "--elastic", "1:3", "--run-dir", "run", kRank, "join", "train"});
  ASSERT_TRUE(run.wait_for("training"));
  const std::string folder = "/proc/" + std::to_string(run.pid());
  const auto descriptors = [&] {
    return std::distance(std::filesystem::directory_iterator(folder + "/fd"), std::filesystem::directory_iterator());
  };
  const auto resident_kb = [&] {
    const std::string status = read_file(folder + "/status");
    return std::stol(status.substr(status.find("VmRSS:") + 6));
  };
  std::vector<std::pair<long, long>> with_one_rank;
  for (int start = 0; start < 12; ++start) {
    const Answer said = resize(run, std::to_string(start % 3 + 1));
    ASSERT_EQ(said.exit_code, 0) << said.text;
    if (start % 3 == 0) with_one_rank.emplace_back(descriptors(), resident_kb());
  }
  // One more while the launcher reads something.
  EXPECT_LE(with_one_rank.back().first, with_one_rank[1].first + 1);
  EXPECT_LE(with_one_rank.back().second, with_one_rank[1].second + 512);
  ::kill(run.pid(), SIGTERM);
  EXPECT_EQ(run.wait().exit_code, 60);
}

TEST(LauncherElastic, AResizeThatCannotBeSaysWhy) {
  Launched rigid({"-n", "2", "--run-dir", "run", kRank, "join", "train"});
  ASSERT_TRUE(rigid.wait_for("training"));
  Answer said = resize(rigid, "3");
  EXPECT_EQ(said.exit_code, 49);
  EXPECT_TRUE(contains(said.text, "started without --elastic, so its number of ranks stays 2")) << said.text;
  Launched run(
      {"-n", "2", "--elastic", "2:3", "--run-dir", "run", kRank, "join", "step", "step", "say=1", "sleep=60000"});
  ASSERT_TRUE(run.wait_for("at 1"));
  said = resize(run, "4");
  EXPECT_EQ(said.exit_code, 2);
  EXPECT_TRUE(contains(said.text, "--elastic 2:3; it cannot have 4 ranks")) << said.text;
  said = resize(run, "3");
  EXPECT_EQ(said.exit_code, 49);
  EXPECT_TRUE(contains(said.text, "does not call Context::stop_requested()")) << said.text;
  EXPECT_EQ(resize(run, "2").exit_code, 0) << "it has them";
  Launched early({"-n", "2", "--elastic", "2:3", "--run-dir", "run", kRank, "join", "say=1", "sleep=60000"});
  ASSERT_TRUE(early.wait_for("at 1"));
  said = resize(early, "3 --timeout 0.3");
  EXPECT_EQ(said.exit_code, 43);
  EXPECT_TRUE(contains(said.text, "still has 2 ranks after 0.3 s")) << said.text;
}

TEST(LauncherElastic, ARankThatFailsTwiceAtItsPlaceIsLeftOut) {
  // Each start goes on from another step.
  const std::string program = std::string("exec ") + kRank + " join checkpoint=$TORCHELASTIC_RESTART_COUNT step " +
                              "sleep=100 2:raise=9 sleep=300";
  Launched run({"--elastic", "2:3", "--run-dir", "run", "sh", "-c", program});
  auto result = run.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(contains(result.err, "restart 2 with 2 ranks: rank 2 failed twice at its place; it is left out"))
      << result.err;
  EXPECT_LT(result.seconds, 5);
  const auto starts = starts_of(run);
  ASSERT_EQ(starts.size(), 3U);
  EXPECT_EQ(starts[1]["culprit"], 2);
  EXPECT_EQ(starts[1]["first_step"], 1);
  EXPECT_EQ(starts[2]["ranks"], 2);
  // A rank that ends by itself; of a kill from outside, any number would be worth a restart.
  const std::string by_itself = std::string("exec ") + kRank + " join checkpoint=$TORCHELASTIC_RESTART_COUNT step " +
                                "sleep=100 2:exit=3 sleep=300";
  Launched few({"--elastic", "3:3", "--run-dir", "run", "sh", "-c", by_itself});
  result = few.wait();
  EXPECT_EQ(result.exit_code, 51) << result.err;
  EXPECT_TRUE(contains(result.err,
                       "ends      no restart: rank 2 failed twice at its place, and without it fewer than the "
                       "3 ranks that --elastic demands would remain"))
      << result.err;
  const auto report = nlohmann::json::parse(read_file(few.folder() / "run/report.json"));
  EXPECT_EQ(report["exit_code"], 51);
  EXPECT_TRUE(contains(report["no_restart"], "failed twice at its place"));
}

TEST(LauncherElastic, TheSameErrorInTheSameStepEndsTheRun) {
  Launched run({"-n", "2", "--max-restarts", "9", "--run-dir", "run", kRank, "join", "step", "sleep=50", "1:throw",
                "sleep=10000"});
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 40) << result.err;
  EXPECT_TRUE(contains(result.err, "restart 1 of 9\n")) << result.err;
  EXPECT_TRUE(contains(result.err, "rank 1 failed twice in step 1 with the same error: this is a bug")) << result.err;
  EXPECT_LT(result.seconds, 4);
}

TEST(LauncherElastic, TheSameStepIsRecognizedWhereRanksGoOnFromMemory) {
  Launched run({"-n", "2", "--max-restarts", "9", "--run-dir", "run", kRank, "join", "first:step", "first:step",
                "memory=2", "step", "sleep=50", "1:throw", "sleep=10000"});
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 40);
  EXPECT_TRUE(contains(result.err, "no restart: rank 1 failed twice in step 3 with the same error")) << result.err;
  const auto starts = starts_of(run);
  ASSERT_EQ(starts.size(), 2U);
  EXPECT_EQ(starts[1]["first_step"], 2);
  EXPECT_EQ(starts[1]["steps"], 1);
}

TEST(LauncherElastic, ABudgetOfRestartsWithinAnHour) {
  // Another rank in another step each time.
  const std::string program = std::string("exec ") + kRank + " join checkpoint=$TORCHELASTIC_RESTART_COUNT step " +
                              "sleep=50 $((TORCHELASTIC_RESTART_COUNT % 2)):raise=9 sleep=10000";
  Launched run({"-n", "2", "--restarts-per-hour", "2", "--run-dir", "run", "sh", "-c", program});
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 41) << result.err;
  EXPECT_TRUE(contains(result.err, "no restart: 2 restarts were made within the last hour")) << result.err;
  EXPECT_EQ(starts_of(run).size(), 3U);
}

TEST(LauncherElastic, NobodyUnwindsBeforeARestart) {
  // Both would take 5 s to stop.
  Launched run({"-n", "2", "--max-restarts", "1", kRank, "ignore_term", "join", "step", "sleep=50", "1:first:raise=9",
                "first:sleep=60000"});
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_LT(result.seconds, 4);
}

TEST(LauncherElastic, StatusTellsOfRestartsAndOfStepsThatWereLost) {
  Launched run({"-n", "2", "--elastic", "2:3", "--run-dir", "run", kRank, "join", "first:step", "first:step",
                "1:first:raise=9", "first:sleep=60000", "step", "step", "step", "say=2", "sleep=60000"});
  ASSERT_TRUE(run.wait_for("at 2"));
  ASSERT_TRUE(eventually([&] { return contains(ask_about(run, "status").text, "effective progress"); }));
  const Answer said = ask_about(run, "status");
  EXPECT_TRUE(contains(said.text, ", 2 ranks, of 2 to 3 that it may have\n")) << said.text;
  EXPECT_TRUE(contains(said.text, "start 2; before it: 2 ranks (2 steps, rank 1 failed (41))\n")) << said.text;
  EXPECT_TRUE(contains(said.text, "effective progress: 3 of 5 steps made were kept, 60 %\n")) << said.text;
}

TEST(LauncherElastic, RefusesWhatCannotBe) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> bad = {
      {{"--elastic", "4:2", "true"}, "--elastic takes MIN:MAX, the smallest and the largest number of ranks"},
      {{"--elastic", "4", "true"}, "--elastic takes MIN:MAX"},
      {{"--elastic", "2:4x", "true"}, "--elastic takes MIN:MAX"},
      {{"-n", "5", "--elastic", "2:4", "true"}, "-n asks for 5 ranks, but --elastic allows 2 to 4"},
      {{"--elastic", "2:4096", "--bind", "core", "true"}, "--bind core: 4096 ranks cannot have one core each"},
      {{"--restarts-per-hour", "x", "true"}, "--restarts-per-hour takes a whole number from 0 to 1000"},
  };
  for (const auto& [words, text] : bad) {
    const auto result = Launched(words).wait();
    EXPECT_EQ(result.exit_code, 2) << text;
    EXPECT_TRUE(contains(result.err, text)) << result.err;
  }
  const auto result = Launched({"--elastic", "2:4", "true"}, {.environment = {"LOCKSTEP_VIRTUAL_RANKS=3"}}).wait();
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_TRUE(contains(result.err, "only 3 virtual ranks")) << result.err;
}

}  // namespace
}  // namespace lockstep
