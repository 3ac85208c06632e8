#include "status_command.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "base/text.h"
#include "launch/launch_error.h"
#include "report/text.h"

namespace lockstep {
namespace {

std::string file_in(const std::string& folder) { return folder + "/rounds.jsonl"; }

/// What follows `"name": ` in a line that the hub has written, up to `end`.
std::string field(const std::string& line, const std::string& name, char end) {
  const std::string before = "\"" + name + "\": ";
  const size_t at = line.find(before);
  const size_t stop = at == std::string::npos ? at : line.find(end, at + before.size());
  if (stop == std::string::npos) throw LaunchError(kExitRefusedInput, "rounds.jsonl has a line without " + name);
  return line.substr(at + before.size(), stop - at - before.size());
}

/// The machines that were left out, and why, of text such as: {"2": "it is late"
std::map<int, std::string> reasons_in(const std::string& left_out) {
  std::map<int, std::string> reasons;
  size_t at = 0;
  const auto next = [&] {
    const size_t begin = left_out.find('"', at),
                 end = begin == std::string::npos ? begin : left_out.find('"', begin + 1);
    at = end == std::string::npos ? left_out.size() : end + 1;
    return end == std::string::npos ? std::string() : left_out.substr(begin + 1, end - begin - 1);
  };
  for (std::string number = next(); !number.empty(); number = next()) reasons[std::stoi(number)] = next();
  return reasons;
}

}  // namespace

bool has_rounds(const std::string& folder) { return std::filesystem::exists(file_in(folder)); }

std::string rounds_text(const std::string& folder) {
  struct Machine {
    int64_t rounds = 0;
    std::string last, left_out;
  };
  std::map<int, Machine> machines;
  std::ifstream file(file_in(folder));
  int64_t rounds = 0, bytes = 0;
  std::string last = "none";
  for (std::string line; std::getline(file, line);) {
    if (!line.ends_with("}")) break;  // it is being written
    ++rounds;
    last = field(line, "round", ',');
    try {
      bytes += std::stoll(field(line, "bytes", ','));
      for (auto& [number, machine] : machines) machine.left_out.clear();
      std::string list = field(line, "took_part", ']').substr(1);
      for (char& c : list)
        if (c == ',') c = ' ';
      std::istringstream numbers(list);
      for (int number; numbers >> number;) {
        ++machines[number].rounds;
        machines[number].last = last;
      }
      for (const auto& [number, why] : reasons_in(field(line, "left_out", '}'))) machines[number].left_out = why;
    } catch (const std::logic_error&) {
      throw LaunchError(kExitRefusedInput, printable(file_in(folder)) + " is not a list of rounds of --islands");
    }
  }
  std::string text = "machines that meet in rounds: " + counted(rounds, "round") + ", the last " + last + "; " +
                     std::to_string(bytes) + " bytes of pseudo-gradients\n";
  for (const auto& [number, machine] : machines) {
    text += "machine " + std::to_string(number) + "  took part in " + counted(machine.rounds, "round");
    if (!machine.last.empty()) text += ", last in round " + machine.last;
    if (!machine.left_out.empty()) text += "; left out now: " + printable(machine.left_out);
    text += "\n";
  }
  return text;
}

}  // namespace lockstep
