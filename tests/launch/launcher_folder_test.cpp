#include <gtest/gtest.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "launch/launched.h"

// The run folder: whose it is, and what it tells of starts that fail.

namespace lockstep::launcher_folder_test {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRank = LOCKSTEP_BIN_DIR "/page_rank";

struct Said {
  int exit_code = -1;
  std::string text;
};

Said said_by(const std::string& line) {
  FILE* pipe = ::popen((line + " 2>&1").c_str(), "r");
  Said said;
  std::array<char, 4096> piece{};
  for (size_t count; (count = ::fread(piece.data(), 1, piece.size(), pipe)) > 0;) said.text.append(piece.data(), count);
  const int status = ::pclose(pipe);
  said.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return said;
}

/// What `lockstep WORDS` prints in `folder`.
Said lockstep_in(const fs::path& folder, const std::string& words) {
  return said_by("cd " + folder.string() + " && " LOCKSTEP_BIN_DIR "/lockstep " + words);
}

std::vector<nlohmann::json> lines_of(const fs::path& file) {
  std::istringstream lines(read_file(file));
  std::vector<nlohmann::json> all;
  for (std::string line; std::getline(lines, line);) all.push_back(nlohmann::json::parse(line));
  return all;
}

std::vector<std::string> names_of(const std::vector<nlohmann::json>& events) {
  std::vector<std::string> names;
  for (const auto& event : events)
    if (event["event"] != "message") names.push_back(event["event"]);
  return names;
}

TEST(LauncherFolder, ASecondLauncherIsRefusedAndTouchesNothing) {
  Launched run({"-n", "1", "--elastic", "1:2", "--run-dir", "run", kRank, "join", "train"});
  ASSERT_TRUE(run.wait_for("training"));
  ASSERT_EQ(lockstep_in(run.folder(), "resize run 2").exit_code, 0);  // so that there is a starts.jsonl
  const auto all = [&] {
    std::string text;
    for (const char* name : {"run.json", "starts.jsonl", "events.jsonl"}) {
      EXPECT_TRUE(fs::exists(run.folder() / "run" / name)) << name;
      text += read_file(run.folder() / "run" / name);
    }
    return text;
  };
  const std::string before = all();
  const Said second = lockstep_in(run.folder(), "run -n 1 --run-dir run -- echo ran");
  EXPECT_EQ(second.exit_code, 48) << second.text;
  EXPECT_TRUE(contains(second.text, "another launcher, process " + std::to_string(run.pid()) + ", uses the run folder"))
      << second.text;
  EXPECT_TRUE(contains(second.text, "--run-dir FOLDER")) << second.text;
  EXPECT_FALSE(contains(second.text, "ran\n")) << second.text;
  EXPECT_EQ(all(), before);
  EXPECT_TRUE(contains(lockstep_in(run.folder(), "status run").text, "2 ranks"));
  // The folder is free as soon as its launcher is gone, however it went.
  ::kill(run.pid(), SIGKILL);
  run.wait();
  const Said third = lockstep_in(run.folder(), "run -n 1 --run-dir run -- echo ran");
  EXPECT_EQ(third.exit_code, 0) << third.text;
  EXPECT_FALSE(fs::exists(run.folder() / "run/.lock"));
}

TEST(LauncherFolder, ALockThatCannotBeHadIsTold) {
  TemporaryFolder folder;
  fs::create_directories(folder.path() / "run/.lock");  // as a file system that has no locks, it refuses
  const Said said = lockstep_in(folder.path(), "run -n 1 --run-dir run -- echo ran");
  EXPECT_EQ(said.exit_code, 0) << said.text;
  EXPECT_TRUE(contains(said.text,
                       "run cannot be locked (Is a directory), so a second launcher in it would not be refused; give "
                       "each run a folder of its own"))
      << said.text;
}

TEST(LauncherFolder, NoLockIsLeftBehind) {
  Launched run({"-n", "1", "true"});
  EXPECT_EQ(run.wait().exit_code, 0);
  EXPECT_TRUE(fs::is_empty(run.folder()));
  Launched named({"-n", "1", "--run-dir", "run", "true"});
  EXPECT_EQ(named.wait().exit_code, 0);
  EXPECT_FALSE(fs::exists(named.folder() / "run/.lock"));
}

TEST(LauncherFolder, StatusListsAllRuns) {
  const auto lines_with = [](const std::string& text, const fs::path& folder) {
    std::istringstream lines(text);
    int count = 0;
    for (std::string line; std::getline(lines, line);) count += line.starts_with(folder.string()) ? 1 : 0;
    return count;
  };
  Launched one({"-n", "2", "--run-dir", "run", kRank, "join", "train"});
  Launched other({"-n", "1", kRank, "join", "train"});  // in a folder that nobody named
  ASSERT_TRUE(one.wait_for("training"));
  ASSERT_TRUE(other.wait_for("training"));
  const Said said = lockstep_in("/", "status --all");
  EXPECT_EQ(said.exit_code, 0) << said.text;
  EXPECT_EQ(lines_with(said.text, one.folder() / "run"), 1) << said.text;
  EXPECT_EQ(lines_with(said.text, other.folder() / "runs"), 1) << said.text;
  EXPECT_TRUE(contains(said.text, "launcher " + std::to_string(one.pid()) + ", 2 ranks")) << said.text;
  EXPECT_EQ(lockstep_in(one.folder(), "status --all run").exit_code, 2);
  for (Launched* run : {&one, &other}) {
    ::kill(run->pid(), SIGINT);
    run->wait();
  }
  const Said after = lockstep_in("/", "status --all");
  EXPECT_EQ(lines_with(after.text, one.folder()) + lines_with(after.text, other.folder()), 0) << after.text;
  // Where there is no other process, there is no other run.
  const std::string alone = "unshare -p -f --mount-proc ";
  if (said_by(alone + "true").exit_code != 0) GTEST_SKIP() << "SKIPPED BECAUSE unshare is not permitted";
  const Said none = said_by(alone + LOCKSTEP_BIN_DIR "/lockstep status --all");
  EXPECT_EQ(none.exit_code, 0);
  EXPECT_EQ(none.text, "this user has no active run on this machine\n");
}

TEST(LauncherFolder, AProgramThatGoesBetweenTwoStartsIsToldInTheBlock) {
  TemporaryFolder folder;
  const std::string program = folder.path() / "program";
  // Rank 1 fails twice at its place, so that the third start has another number of ranks, and is planned anew.
  std::ofstream(program) << "#!/bin/sh\n[ $RANK = 1 ] && {\n  sleep 0.5\n"  // all shells have opened it by then
                         << "  [ $TORCHELASTIC_RESTART_COUNT = 1 ] && rm -f " << program
                         << "\n  kill -9 $$\n}\nexec sleep 60\n";
  fs::permissions(program, fs::perms::owner_all);
  Launched run({"-n", "2", "--elastic", "1:2", "--max-restarts", "5", "--run-dir", "run", program});
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 46) << result.err;
  EXPECT_TRUE(contains(result.err, "no restart: the next start failed: ")) << result.err;
  EXPECT_TRUE(contains(result.err, "rank 1 of 2 failed first: killed by SIGKILL")) << result.err;
  EXPECT_TRUE(contains(result.err, "ends with exit code 46")) << result.err;
  const auto report = nlohmann::json::parse(read_file(run.folder() / "run/report.json"));
  EXPECT_EQ(report["exit_code"], 46);
  EXPECT_TRUE(contains(report["no_restart"].get<std::string>(), program)) << report["no_restart"];
  const auto events = lines_of(run.folder() / "run/events.jsonl");
  EXPECT_EQ(events.back()["event"], "end");
  EXPECT_EQ(events.back()["exit_code"], 46);
}

TEST(LauncherFolder, EventsComeInTheirOrderOverARestartAndAResize) {
  Launched run({"-n", "2", "--elastic", "1:2", "--max-restarts", "1", "--run-dir", "run", "sh", "-c",
                "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && { [ $RANK = 1 ] && kill -9 $$; exec sleep 60; }; "
                "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exec " +
                    std::string(kRank) + " join train; sleep 1; exit 0"});
  ASSERT_TRUE(run.wait_for("training"));
  ASSERT_EQ(lockstep_in(run.folder(), "resize run 1").exit_code, 0);
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(contains(result.err, "succeeded after 1 restart and 1 resize")) << result.err;
  const auto events = lines_of(run.folder() / "run/events.jsonl");
  EXPECT_EQ(names_of(events),
            (std::vector<std::string>{"start", "rank_ended", "rank_ended", "start_ended", "start", "rank_ended",
                                      "rank_ended", "start_ended", "start", "rank_ended", "start_ended", "end"}));
  std::vector<nlohmann::json> ends;
  for (const auto& event : events)
    if (event["event"] == "start_ended") ends.push_back(event);
  ASSERT_EQ(ends.size(), 3U);
  EXPECT_EQ(ends[0]["exit_code"], 41);
  EXPECT_EQ(ends[0]["culprit"], 1);
  EXPECT_EQ(ends[0]["resized"], false);
  EXPECT_EQ(ends[1]["resized"], true);
  EXPECT_EQ(ends[2]["exit_code"], 0);
  double last = 0;
  for (const auto& event : events) {
    EXPECT_GE(event["time_s"].get<double>(), last);
    last = event["time_s"];
  }
}

TEST(LauncherFolder, ResizesAreNotToldAsRestarts) {
  Launched run(
      {"-n", "1", "--elastic", "1:3", "--run-dir", "run", "sh", "-c",
       "[ $TORCHELASTIC_RESTART_COUNT = 2 ] && { sleep 1; exit 0; }; exec " + std::string(kRank) + " join train"});
  ASSERT_TRUE(run.wait_for("training"));
  ASSERT_EQ(lockstep_in(run.folder(), "resize run 2").exit_code, 0);
  ASSERT_EQ(lockstep_in(run.folder(), "resize run 3").exit_code, 0);
  const auto result = run.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(contains(result.err, "succeeded after 2 resizes\n")) << result.err;
  EXPECT_FALSE(contains(result.err, "restart 1")) << result.err;
}

}  // namespace
}  // namespace lockstep::launcher_folder_test
