#include "launch/diagnosis/failure_report.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "launch/launch_error.h"
#include "support/temporary_folder.h"

namespace lockstep::failure_report_test {
namespace {

using Kind = ProcessEnd::Kind;

FailureReport small_report() {
  return {.verdict = {.exit_code = 40,
                      .culprit = RankEnd{.rank = 1, .pid = 101, .how = {Kind::kExited, 3}, .seconds = 1.5},
                      .headline = "failed first: exit code 3",
                      .also_suspect = {2}},
          .exit_code = 40,
          .world_size = 4,
          .host = "here",
          .program = "/bin/train",
          .command = "lockstep run -n 4 train",
          .log_path = "/run/rank_1.log",
          .report_path = "/run/report.json",
          .tail = {"a", "b"},
          .killed = {0}};
}

TEST(FailureReport, OneBlock) {
  EXPECT_EQ(format(small_report()),
            "lockstep: rank 1 of 4 failed first: exit code 3\n"
            "  process   101 on here, 1.50 s after its start\n"
            "  program   /bin/train\n"
            "  last did  unknown: the program has no lockstep::Context to tell the launcher\n"
            "  unsure    rank 2 failed at the same time; which rank failed first is not known\n"
            "  killed    rank 0, which did not stop when asked to\n"
            "  kept      unknown: the program has no lockstep::Context to tell the launcher\n"
            "  next      lockstep run -n 4 train\n"
            "  report    /run/report.json\n"
            "  explain   lockstep explain 40\n"
            "  log       /run/rank_1.log\n"
            "  its last 2 lines:\n"
            "  | a\n"
            "  | b\n");
}

FailureReport full_report() {
  FailureReport report = small_report();
  report.what = "out of range\nsecond line";
  report.accounts.resize(4);
  RankStatus& culprit = report.accounts[1];
  culprit.phase = RankStatus::Phase::kJoined;
  culprit.operation = {
      .sequence = 12, .kind = "all_reduce", .dtype = "Float", .shape = {64, 10}, .elements = 640, .running = true};
  report.left = {.path = "/run/step_400.pt", .step = 400};
  report.verdict.witness = 3;
  report.verdict.testimony = "rank 1 has left\x1b[31m";
  report.restarts = 2;
  return report;
}

TEST(FailureReport, TellsWhatIsKnown) {
  const std::string text = format(full_report());
  for (const char* line : {"  what      out of range\n", "  known by  rank 3, which says: rank 1 has left\\x1b[31m\n",
                           "  last did  all_reduce #12 (Float [64, 10]), not finished\n",
                           "  kept      step 400 in /run/step_400.pt\n", "  restarts  2 restarts before this\n",
                           "  next      lockstep run -n 4 train   (resumes, if the program does)\n"})
    EXPECT_NE(text.find(line), std::string::npos) << line << text;
}

TEST(FailureReport, TellsWhatIsInTheLaunchersMemory) {
  FailureReport report = full_report();
  const auto kept = [&] {
    const std::string text = format(report);
    const size_t at = text.find("  kept      ");
    return text.substr(at, text.find('\n', at) - at);
  };
  report.left.in_memory = 407;
  report.goes_on = true;
  EXPECT_EQ(kept(), "  kept      step 407 in the launcher's memory, step 400 in /run/step_400.pt");
  auto json = nlohmann::json::parse(to_json(report));
  EXPECT_EQ(json["state_kept"]["memory_step"], 407);
  EXPECT_EQ(json["state_kept"]["step"], 400);
  report.left.suspect = true;
  EXPECT_EQ(
      kept(),
      "  kept      step 407 in the launcher's memory (saved before the divergence was found; it may have diverged, "
      "too), step 400 in /run/step_400.pt");
  json = nlohmann::json::parse(to_json(report));
  EXPECT_EQ(json["state_kept"]["problem"], "saved before the divergence was found");
  report.left.suspect = false;
  report.left.path.clear();
  EXPECT_EQ(kept(), "  kept      step 407 in the launcher's memory");
  EXPECT_EQ(nlohmann::json::parse(to_json(report))["state_kept"], nlohmann::json({{"memory_step", 407}}));
  report.left = {};
  EXPECT_EQ(kept(), "  kept      no checkpoint that the launcher knows of");
}

TEST(FailureReport, TellsWhereTheStateInMemoryWentWhenTheRunGaveUp) {
  FailureReport report = full_report();
  report.left = {.path = "/run/step_407.pt", .step = 407, .in_memory = 407, .written = true};
  EXPECT_TRUE(
      format(report).find("  kept      step 407 in /run/step_407.pt, written from the launcher's memory now\n") !=
      std::string::npos)
      << format(report);
  const auto json = nlohmann::json::parse(to_json(report))["state_kept"];
  EXPECT_EQ(json["checkpoint"], "/run/step_407.pt");
  EXPECT_EQ(json["written_from_memory"], true);
  EXPECT_FALSE(json.contains("memory_step"));
  const auto left = [](const StateLeft& state) { return describe(state, /*goes_on=*/false); };
  EXPECT_EQ(left({.path = "/a", .step = 400, .in_memory = 407, .problem = "the disk is full"}),
            "step 400 in /a; step 407 was in the launcher's memory and could not be written (the disk is full)");
  EXPECT_EQ(left({.in_memory = 407, .problem = "the disk is full"}),
            "no checkpoint on disk; step 407 was in the launcher's memory and could not be written (the disk is full)");
  EXPECT_EQ(left({.path = "/b", .step = 407, .in_memory = 407, .written = true, .problem = "no place in /a"}),
            "step 407 in /b, written from the launcher's memory now (no place in /a)");
  EXPECT_EQ(left({.path = "/a", .step = 410, .in_memory = 407}), "step 410 in /a");
  EXPECT_EQ(left({}), "");
}

TEST(FailureReport, ARunMayEndWithAnotherCodeThanItsLastRanks) {
  FailureReport report = small_report();
  report.exit_code = kExitTooFewRanks;
  EXPECT_NE(format(report).find("  explain   lockstep explain 51\n"), std::string::npos);
  EXPECT_EQ(nlohmann::json::parse(to_json(report))["exit_code"], kExitTooFewRanks);
  EXPECT_EQ(for_program(report).exit_code, kExitTooFewRanks);
}

TEST(FailureReport, TheSameAsJson) {
  const auto json = nlohmann::json::parse(to_json(full_report()));
  EXPECT_EQ(json["exit_code"], 40);
  EXPECT_EQ(json["culprit"]["rank"], 1);
  EXPECT_EQ(json["culprit"]["pid"], 101);
  EXPECT_EQ(json["culprit"]["host"], "here");
  EXPECT_EQ(json["culprit"]["what"], "out of range\nsecond line");
  EXPECT_EQ(json["culprit"]["end"]["value"], 3);
  EXPECT_EQ(json["culprit"]["last_collective"]["sequence"], 12);
  EXPECT_EQ(json["culprit"]["last_collective"]["shape"], (std::vector<int>{64, 10}));
  EXPECT_EQ(json["culprit"]["last_collective"]["of"], "");
  EXPECT_EQ(json["culprit"]["last_collective"]["finished"], false);
  EXPECT_EQ(json["how_known"]["rank"], 3);
  EXPECT_EQ(json["state_kept"]["step"], 400);
  EXPECT_EQ(json["next_command"], "lockstep run -n 4 train");
  EXPECT_EQ(json["last_lines"], (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(json["restarts"], 2);
  EXPECT_EQ(json["ranks"].size(), 4U);
  EXPECT_EQ(json["ranks"][0]["last_collective"], nullptr);
}

TEST(FailureReport, BytesThatAreNoTextAreReplacedInJson) {
  FailureReport report = small_report();
  report.tail = {"\xff\xfe"};
  EXPECT_TRUE(nlohmann::json::accept(to_json(report)));
}

TEST(FailureReport, ARunThatWasToldToEnd) {
  FailureReport report;
  report.verdict.exit_code = report.exit_code = 60;
  report.stop_signal = "SIGTERM";
  report.command = "lockstep run train";
  report.accounts.resize(1);
  report.accounts[0].phase = RankStatus::Phase::kLeft;
  EXPECT_EQ(format(report),
            "lockstep: ended by SIGTERM\n"
            "  kept      no checkpoint that the launcher knows of\n"
            "  next      lockstep run train\n");
  EXPECT_EQ(nlohmann::json::parse(to_json(report))["culprit"], nullptr);
}

TEST(FailureReport, TellsOfAKillForMemory) {
  FailureReport report = small_report();
  report.verdict.exit_code = kExitOutOfMemory;
  report.verdict.culprit->how = {Kind::kSignalled, SIGKILL};
  report.verdict.culprit->peak_bytes = 500 << 20;
  report.verdict.culprit->memory = {.count = 1, .counted_in = "the cgroup /x", .limit_bytes = 512 << 20};
  EXPECT_NE(
      format(report).find("memory    killed for memory: the cgroup /x counts 1 such kill since the start; the limit is "
                          "512 MiB; this rank had at most 500 MiB in memory\n"),
      std::string::npos)
      << format(report);
}

class FakeMachine {
 public:
  void write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = folder_.path() / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  MemoryKills count() const { return count_memory_kills(folder_.path().string()); }

 private:
  TemporaryFolder folder_;
};

TEST(MemoryKills, OfTheNearestGroup) {
  FakeMachine machine;
  EXPECT_EQ(machine.count().counted_in, "");
  machine.write("proc/vmstat", "pgfault 5\noom_kill 9\n");
  EXPECT_EQ(machine.count().count, 9U);
  EXPECT_EQ(machine.count().counted_in, "the whole machine");
  machine.write("proc/self/cgroup", "0::/a/b\n");
  machine.write("sys/fs/cgroup/a/memory.events", "low 0\noom 3\noom_kill 2\n");
  machine.write("sys/fs/cgroup/a/memory.max", "1048576\n");
  machine.write("sys/fs/cgroup/a/b/memory.events", "low 0\noom_kill 1\n");
  machine.write("sys/fs/cgroup/a/b/memory.max", "max\n");
  EXPECT_EQ(machine.count().count, 1U);
  EXPECT_EQ(machine.count().counted_in, "the cgroup /a/b");
  EXPECT_EQ(machine.count().limit_bytes, 1048576U) << "of the group around";
}

TEST(MemoryKills, OfVersionOne) {
  FakeMachine machine;
  machine.write("proc/self/cgroup", "9:name=systemd:/\n4:memory:/x\n0::/\n");
  machine.write("sys/fs/cgroup/memory/x/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n");
  machine.write("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "2097152\n");
  machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(machine.count().count, 4U);
  EXPECT_EQ(machine.count().counted_in, "the cgroup /x");
  EXPECT_EQ(machine.count().limit_bytes, 2097152U);
}

TEST(FailureReport, AWordThatIsPastedIsTheSameWord) {
  EXPECT_EQ(pasted_word("it's"), "'it'\\''s'");
  EXPECT_EQ(pasted_word("a\nb'c\\\x1b[31m"), "$'a\\nb\\'c\\\\\\x1b[31m'");
  EXPECT_EQ(pasted_word("caf\xc3\xa9\t"), "$'caf\\xc3\\xa9\\x09'");
}

}  // namespace
}  // namespace lockstep::failure_report_test
