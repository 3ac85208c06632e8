#include "faultbox/report.h"

#include <nlohmann/json.hpp>

#include <cstdlib>
#include <regex>

namespace lockstep::faultbox {
namespace {

/// "0, 2-5" as numbers.
std::vector<int> numbers_of(const std::string& list) {
  std::vector<int> numbers;
  const std::regex item("(\\d+)(-(\\d+))?");
  for (std::sregex_iterator match(list.begin(), list.end(), item), end; match != end; ++match) {
    const int first = std::stoi((*match)[1]), last = (*match)[3].matched ? std::stoi((*match)[3]) : first;
    for (int number = first; number <= last; ++number) numbers.push_back(number);
  }
  return numbers;
}

void check_json(Report& report, const std::string& text, int exit_code) {
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto wrong = [&](const std::string& what) { report.problems.push_back("report.json: " + what); };
  if (!json.is_object()) return wrong("is not a JSON object");
  if (json.value("exit_code", -1) != exit_code)
    wrong("exit_code is " + json.value("exit_code", nlohmann::json()).dump());
  if (!report.culprit) return;
  const auto culprit = json.value("culprit", nlohmann::json());
  if (!culprit.is_object()) return wrong("has no culprit");
  if (culprit.value("rank", -1) != *report.culprit)
    wrong("names rank " + culprit.value("rank", nlohmann::json()).dump());
  for (const char* field : {"host", "pid", "what", "last_collective"})
    if (!culprit.contains(field)) wrong(std::string("its culprit lacks ") + field);
  for (const char* field : {"how_known", "state_kept", "next_command", "last_lines"})
    if (!json.contains(field)) wrong(std::string("lacks ") + field);
}

}  // namespace

Report read_report(const std::vector<Line>& lines, const std::string& json, int exit_code) {
  Report report;
  const std::regex early("^lockstep: (rank \\d+: .*stopping the other ranks|no progress for .*stopping the ranks).*");
  const std::regex block("^lockstep: (rank (\\d+) of \\d+ .*)");
  const std::regex unsure("^  unsure +rank ([-0-9, ]+) failed at the same time.*");
  for (const Line& line : lines) {
    report.text += line.text + "\n";
    std::smatch match;
    const bool heads = std::regex_match(line.text, match, block);
    if (heads) {
      report.headline = match[1];
      report.culprit = std::stoi(match[2]);
    }
    std::smatch rest;
    if (line.text.starts_with("lockstep: restart ")) report.known_ns.reset();
    if (!report.known_ns && (heads || std::regex_match(line.text, rest, early))) report.known_ns = line.at_ns;
    if (std::regex_match(line.text, rest, unsure)) report.also_suspect = numbers_of(rest[1]);
  }
  if (!json.empty()) check_json(report, json, exit_code);
  return report;
}

}  // namespace lockstep::faultbox
