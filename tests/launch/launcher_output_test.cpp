#include <gtest/gtest.h>

#include <thread>

#include "launch/launched.h"

// Where the ranks' output goes, and that no reader, terminal or disk stops a run.

namespace lockstep {
namespace {

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(LauncherOutput, RankZeroIsPassedOnByteForByte) {
  std::string bytes;
  for (int i = 0; i < 3 * 256; ++i) bytes.push_back(static_cast<char>(i));
  bytes += "10%\r20%\rno newline at the end";
  const auto result = Launched({"-n", "2", "cat"}, {.input = bytes}).wait();
  EXPECT_EQ(result.out, bytes);
  EXPECT_EQ(result.err, "");
}

TEST(LauncherOutput, StreamsStayApartAndTheLogHasBoth) {
  Launched run({"-n", "2", "--run-dir", "run", "sh", "-c", "printf 'o%s\\n' $RANK; printf 'e%s\\n' $RANK >&2"});
  const auto result = run.wait();
  EXPECT_EQ(result.out, "o0\n");
  EXPECT_EQ(result.err, "e0\n");
  EXPECT_EQ(run.log(0), "o0\ne0\n");
  EXPECT_EQ(run.log(1), "o1\ne1\n");
}

TEST(LauncherOutput, ComesWhileTheRankRuns) {
  Launched run({"-n", "2", "sh", "-c", "printf '1%%\\r'; read line; echo got $line"});
  EXPECT_TRUE(run.wait_for("1%\r"));
  EXPECT_EQ(run.wait().exit_code, 0);
}

TEST(LauncherOutput, ALogKeepsTheLastStateOfARedrawnLine) {
  Launched run({"-n", "2", "--run-dir", "run", "printf", "1%%\\r2%%\\r3%%\\nend"});
  EXPECT_EQ(run.wait().out, "1%\r2%\r3%\nend");
  EXPECT_EQ(run.log(0), "3%\nend\n");
  EXPECT_EQ(run.log(1), "3%\nend\n");
}

TEST(LauncherOutput, FiftyMegabytesFlow) {
  Launched run({"-n", "2", "--run-dir", "run", "sh", "-c", "yes 0123456789abcdef0123456789abcde | head -c 25600000"});
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out.size(), 25600000u);
  EXPECT_TRUE(result.out == run.log(0));
  EXPECT_TRUE(result.out == run.log(1));
}

TEST(LauncherOutput, ASlowReaderLosesNothing) {
  Launched run({"sh", "-c", "yes 0123456789abcde | head -c 4000000"});
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_FALSE(run.processes().empty()) << "rank 0 waits for the reader, as it would without a launcher";
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out.size(), 4000000u);
}

TEST(LauncherOutput, AReaderThatLeavesStopsNothing) {
  Launched run({"-n", "2", "--run-dir", "run", "sh", "-c", "yes 0123456789abcde | head -c 4000000; echo done >&2"});
  run.stop_reading();
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_TRUE(contains(result.err, "done")) << result.err;
  EXPECT_TRUE(contains(result.err, "found no reader")) << result.err;
  EXPECT_EQ(run.log(0).size(), 4000000u + 5u);
}

TEST(LauncherOutput, AFullDiskStopsNothing) {
  // A limit on the size of files fails writes as a full disk does.
  Launched run({"-n", "2", "--run-dir", "run", "sh", "-c", "yes 0123456789abcde | head -c 400000"},
               {.before = "ulimit -f 8"});
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out.size(), 400000u);
  EXPECT_TRUE(contains(result.err, "the ranks have no pages")) << result.err;
  EXPECT_TRUE(contains(result.err, "lines of rank 1 could not be written to its log: File too large")) << result.err;
}

TEST(LauncherOutput, AProcessThatLeftItsGroupDoesNotHoldTheRunUp) {
  Launched run({"-n", "2", "sh", "-c", "setsid sleep 30 & exit 0"});
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_LT(result.seconds, 10);
}

TEST(LauncherOutput, RunsWithoutStandardStreams) {
  Launched run({"-n", "2", "--run-dir", "run", "sh", "-c", "echo out; echo err >&2; cat"},
               {.before = "exec <&- >&- 2>&-"});
  EXPECT_EQ(run.wait().exit_code, 0);
  EXPECT_EQ(run.log(0), "out\nerr\n");
  EXPECT_EQ(run.log(1), "out\nerr\n");
}

TEST(LauncherOutput, OnATerminal) {
  Launched run(
      {"-n", "2", "--run-dir", "run", "sh", "-c", "echo columns $LOCKSTEP_TERMINAL; read line; echo got $line"},
      {.terminal = true});
  EXPECT_TRUE(run.wait_for("columns 123"));
  run.type("typed\n");
  EXPECT_TRUE(run.wait_for("got typed"));
  EXPECT_EQ(run.wait().exit_code, 0);
  EXPECT_EQ(run.log(1), "columns\ngot\n") << "the others have no terminal and no input";
}

TEST(LauncherOutput, ATerminalThatIsNotReadStopsNothing) {
  Launched run({"--run-dir", "run", "sh", "-c", "yes 0123456789abcde | head -c 8000000; touch done"},
               {.terminal = true});
  EXPECT_TRUE(eventually([&] { return std::filesystem::exists(run.folder() / "done"); }));
  EXPECT_EQ(run.wait().exit_code, 0);
  EXPECT_EQ(run.log(0).size(), 8000000u);
}

}  // namespace
}  // namespace lockstep
