#include "launch/run_journal.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "launch/launched.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

std::vector<nlohmann::json> events_in(const TemporaryFolder& folder) {
  std::ifstream lines(folder.path() / "events.jsonl");
  std::vector<nlohmann::json> events;
  for (std::string line; std::getline(lines, line);) events.push_back(nlohmann::json::parse(line));
  return events;
}

/// Files of this process may have no more bytes: as on a full disk a write ends early, and the next one fails.
class FullDisk {
 public:
  explicit FullDisk(uintmax_t bytes) : handler_(::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, handler_);
  }

 private:
  sighandler_t handler_;
  rlimit before_{};
};

TEST(RunJournal, LinesThatAFullDiskHasRefusedAreWrittenOnceThereIsRoom) {
  const TemporaryFolder folder;
  RunJournal journal(folder.path().string(), true);
  journal.started(0, {11, 12});
  {
    const FullDisk full(std::filesystem::file_size(folder.path() / "events.jsonl") + 20);
    journal.said("one");
    journal.said("two");
    ASSERT_EQ(events_in(folder).size(), 1U) << "no part of a line";
    const auto troubles = journal.take_troubles();
    ASSERT_EQ(troubles.size(), 1U) << "told once";
    EXPECT_TRUE(troubles[0].ends_with("events.jsonl could not be written"));
  }
  journal.run_ended(0);
  EXPECT_TRUE(journal.take_troubles().empty());
  const auto events = events_in(folder);
  ASSERT_EQ(events.size(), 4U);
  EXPECT_EQ(events[0]["pids"], nlohmann::json({11, 12}));
  EXPECT_EQ(events[1]["text"], "one");
  EXPECT_EQ(events[2]["text"], "two");
  EXPECT_EQ(events[3]["event"], "end");
}

TEST(RunJournal, AReportThatAFullDiskRefusesLeavesTheOlderOne) {
  const TemporaryFolder folder;
  RunJournal journal(folder.path().string(), true);
  const FailureReport report{.program = "./train", .command = "lockstep run ./train"};
  {
    const FullDisk full(20);
    journal.write_report(report, 0);
    EXPECT_EQ(journal.take_troubles().size(), 1U);
    EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << "no file of no bytes, or of some";
  }
  journal.write_report(report, 0);
  const std::string before = read_file(folder.path() / "report.json");
  EXPECT_EQ(nlohmann::json::parse(before)["program"], "./train");
  {
    const FullDisk full(20);
    journal.write_report(FailureReport{.program = "./other"}, 0);
    EXPECT_EQ(journal.take_troubles().size(), 1U);
  }
  EXPECT_EQ(read_file(folder.path() / "report.json"), before);
  EXPECT_TRUE(journal.take_troubles().empty());
}

TEST(RunJournal, AWellRunInAFolderThatNobodyNamedLeavesNoFile) {
  const TemporaryFolder folder;
  RunJournal journal(folder.path().string(), false);
  journal.started(0, {11});
  journal.rank_ended(0, "exit code 0", false);
  journal.run_ended(0);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  RunJournal other(folder.path().string(), false);
  other.started(0, {11});
  other.rank_ended(0, "exit code 3", true);
  EXPECT_EQ(events_in(folder).size(), 2U) << "with what came before";
}

}  // namespace
}  // namespace lockstep
