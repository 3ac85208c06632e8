#include "launch/start_record.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "support/temporary_folder.h"

namespace lockstep {
namespace {

std::set<std::string> names_in(const std::filesystem::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

TEST(StartRecord, TheNewestReportsOfRestartsAreKept) {
  const TemporaryFolder folder;
  for (int restart = 1; restart <= 3 * kRestartReports; ++restart) {
    std::ofstream(folder.path() / restart_report(restart)) << restart;
    prune_restart_reports(folder.path(), restart);
  }
  std::set<std::string> newest;
  for (int restart = 2 * kRestartReports + 1; restart <= 3 * kRestartReports; ++restart)
    newest.insert("restart_" + std::to_string(restart) + ".json");
  EXPECT_EQ(names_in(folder.path()), newest);
}

TEST(StartRecord, WhatAnEarlierRunLeftGoes) {
  const TemporaryFolder folder;
  const std::set<std::string> others = {"restart_1.json.bak", "restart_x.json", "restart_.json", "rank_0.log"};
  for (const std::string& name : others) std::ofstream(folder.path() / name) << "mine";
  for (const char* name : {"report.json", "restart_1.json", "restart_4711.json"})
    std::ofstream(folder.path() / name) << "old";
  std::ofstream(folder.path() / "starts.jsonl") << line_of_start({});
  forget_earlier_run(folder.path());
  EXPECT_EQ(names_in(folder.path()), others);
}

}  // namespace
}  // namespace lockstep
