#include "launch/start_record.h"

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

namespace lockstep {
namespace {

const std::string kReportStart = "restart_";

}  // namespace

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string line_of_start(const StartRecord& start) {
  const nlohmann::ordered_json line = {
      {"start", start.number},        {"ranks", start.ranks},           {"began_s", start.began_s},
      {"ended_s", start.ended_s},     {"first_step", start.first_step}, {"steps", start.steps},
      {"exit_code", start.exit_code}, {"culprit", start.culprit},       {"resized", start.resized}};
  return line.dump() + "\n";
}

std::string restart_report(int restart) { return kReportStart + std::to_string(restart) + ".json"; }

void prune_restart_reports(const std::string& folder, int newest) {
  std::error_code ignored;
  if (newest > kRestartReports)
    std::filesystem::remove(folder + "/" + restart_report(newest - kRestartReports), ignored);
}

void forget_earlier_run(const std::string& folder) {
  std::error_code ignored;
  std::filesystem::remove(folder + "/starts.jsonl", ignored);
  std::filesystem::remove(folder + "/report.json", ignored);
  std::vector<std::filesystem::path> reports;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename();
    if (name.rfind(kReportStart, 0) == 0 && name == restart_report(std::atoi(name.c_str() + kReportStart.size())))
      reports.push_back(entry.path());
  }
  for (const auto& report : reports) std::filesystem::remove(report, ignored);
}

}  // namespace lockstep
