#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <fstream>
#include <thread>

#include "launch/launched.h"

// Where the ranks' output goes, and that no reader, terminal or disk stops a run.

namespace lockstep {
namespace {

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
  EXPECT_TRUE(contains(result.err, "nothing read them")) << result.err;
  EXPECT_EQ(run.log(0).size(), 4000000u + 5u);
}

TEST(LauncherOutput, AFullDiskStopsNothing) {
  // A limit on the size of files makes writes fail as a full disk does.
  Launched run({"-n", "2", "--run-dir", "run", "sh", "-c", "yes 0123456789abcde | head -c 400000"},
               {.before = "ulimit -f 8"});
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out.size(), 400000u);
  EXPECT_TRUE(contains(result.err, "the ranks have no pages")) << result.err;
  EXPECT_TRUE(contains(result.err, "lines of rank 1 could not be written to its log: File too large")) << result.err;
}

TEST(LauncherOutput, ALogThatTakesLinesAgainTellsWhatIsMissing) {
  // A file system of 64 KiB, full while the rank prints, then not; what the launcher may still have to write fits then.
  Launched run({"--run-dir", "run", "sh", "-c",
                "echo first; seq -f '%0100.0f' 400; for i in $(seq 100); do [ $(stat -f -c %a run) = 0 ] && break; "
                "sleep 0.05; done; "
                "sleep 0.5; rm run/filler; sleep 0.2; echo last"},
               {.before = "mkdir run; mount -t tmpfs -o size=64k none run 2>/dev/null || exit 99\n"
                          "head -c 32000 /dev/zero > run/filler"});
  const auto result = run.wait();
  if (result.exit_code == 99) GTEST_SKIP() << "may not mount a tmpfs";
  EXPECT_EQ(result.exit_code, 0);
  const std::string log = run.log(0);
  EXPECT_TRUE(contains(log, "lines are missing here: No space left on device\n")) << log.substr(0, 200);
  EXPECT_TRUE(log.starts_with("first\n"));
  EXPECT_TRUE(log.ends_with("last\n"));
  EXPECT_TRUE(contains(result.err, "lines of rank 0 could not be written to its log: No space")) << result.err;
}

TEST(LauncherOutput, SeveralRanksAreFoldedLineByLine) {
  // Lines merge if they come within the merger's window. A busy machine may delay a rank for longer: then try once
  // more.
  const auto fold = [] {
    Launched run({"-n", "3", "--tee", "all", "--run-dir", "run", "sh", "-c",
                  "echo same; echo mine $RANK; echo bad >&2; printf end"});
    const auto result = run.wait();
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_TRUE(run.log(1).ends_with("end\n"));
    for (const char* line : {"[0] mine 0\n", "[1] mine 1\n", "[2] mine 2\n"})
      EXPECT_TRUE(contains(result.out, line)) << result.out;
    return result;
  };
  const auto folded = [](const Launched::Result& result) {
    return contains(result.out, "[0-2] same\n") && contains(result.out, "[0-2] end\n") &&
           contains(result.err, "[0-2] bad\n");
  };
  auto result = fold();
  for (int again = 0; again < 5 && !folded(result); ++again) result = fold();
  EXPECT_TRUE(folded(result)) << result.out << result.err;
}

TEST(LauncherOutput, OneOtherRankIsPassedOnAsItIs) {
  const auto result =
      Launched({"-n", "3", "--tee", "2", "sh", "-c", "printf \"rank $RANK\\r\"; echo e$RANK >&2"}).wait();
  EXPECT_EQ(result.out, "rank 2\r");
  EXPECT_TRUE(result.err.ends_with("e2\n")) << result.err;
  for (const char* other : {"e0", "e1"}) EXPECT_FALSE(contains(result.err, other)) << result.err;
}

TEST(LauncherOutput, ALineOfOneRankIsNotHeldUp) {
  Launched run({"-n", "2", "--tee", "0-1", "sh", "-c", "[ $RANK = 1 ] && echo alone; sleep 5"});
  EXPECT_TRUE(run.wait_for("[1] alone"));
  ::kill(run.pid(), SIGINT);
  EXPECT_LT(run.wait().seconds, 3);
}

TEST(LauncherOutput, AReaderThatHangsHoldsNobodyUpForGood) {
  // More than pipe and queue hold; nobody reads for longer than the launcher's patience.
  Launched run({"--run-dir", "run", "sh", "-c", "yes 0123456789abcde | head -c 4000000; touch done"});
  EXPECT_FALSE(eventually([&] { return std::filesystem::exists(run.folder() / "done"); }, std::chrono::seconds(2)));
  EXPECT_TRUE(eventually([&] { return std::filesystem::exists(run.folder() / "done"); }));
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(run.log(0).size(), 4000000u);
  EXPECT_LT(result.out.size(), 4000000u);
  EXPECT_TRUE(contains(result.err, std::to_string(4000000u - result.out.size()) + " bytes")) << result.err;
}

TEST(LauncherOutput, AClosedTerminalStopsNothing) {
  Launched run({"-n", "2", "--run-dir", "run", "sh", "-c",
                "echo ready; read line; echo in ended; sleep 0.5; seq 100000; echo end"},
               {.terminal = true});
  ASSERT_TRUE(run.wait_for("ready"));
  run.stop_reading();  // the session's end: SIGHUP, and errors from then on
  EXPECT_EQ(run.wait().exit_code, 0);
  for (const int rank : {0, 1}) EXPECT_TRUE(run.log(rank).ends_with("100000\nend\n")) << rank;
  EXPECT_TRUE(run.processes().empty());
}

/// The peak memory of a process, in KiB.
size_t peak_kib(pid_t pid) {
  const std::string status = read_file("/proc/" + std::to_string(pid) + "/status");
  const size_t at = status.find("VmHWM:");
  return at == std::string::npos ? 0 : std::stoul(status.substr(at + 6));
}

TEST(LauncherOutput, AGigabyteNeedsNoMemoryAndStopsNobody) {
  // 256 MiB unless the long counts are asked for: it takes a disk some seconds.
  const size_t bytes = (std::getenv("LOCKSTEP_NIGHTLY") != nullptr ? size_t{1} << 30 : size_t{256} << 20);
  Launched run({"-n", "2", "--run-dir", "run", "sh", "-c",
                "if [ $RANK = 1 ]; then yes $(seq -s, 300) | head -c " + std::to_string(bytes) + "; fi; echo end; " +
                    "while [ ! -e go ]; do sleep 0.1; done"});
  ASSERT_TRUE(eventually([&] { return contains(read_file(run.folder() / "run/rank_0.log"), "end"); }));
  const auto log_size = [&] {
    std::error_code missing;
    const auto size = std::filesystem::file_size(run.folder() / "run/rank_1.log", missing);
    return missing ? 0 : size;
  };
  // Lines of 1,092 bytes, each after a time of 25; "end" joins the last, of which head has cut something off.
  const size_t expected = bytes + 4 + 25 * (bytes / 1092 + 1);
  EXPECT_TRUE(eventually([&] { return log_size() >= expected; }, std::chrono::seconds(100))) << log_size();
  EXPECT_EQ(log_size(), expected);
  EXPECT_LT(peak_kib(run.pid()), 32u << 10);
  EXPECT_GT(peak_kib(run.pid()), 0u);
  std::ofstream(run.folder() / "go") << "go";
  EXPECT_EQ(run.wait().exit_code, 0);
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
