#include "hosts/host_list.h"

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>

#include "launch/launch_error.h"
#include "launch/option_values.h"
#include "launch/plan.h"

namespace lockstep::hosts {
namespace {

constexpr size_t kMostHosts = 4096;

[[noreturn]] void refuse(const std::string& text) { throw LaunchError(kExitBadCommandLine, text); }

void add_host(std::vector<Host>& hosts, Host host, const std::string& where) {
  if (host.name.empty() || host.name.starts_with('-') ||
      std::any_of(host.name.begin(), host.name.end(), [](unsigned char c) { return c <= ' ' || c == 127; }))
    refuse(where + ": '" + host.name + "' is not the name of a machine");
  if (std::any_of(hosts.begin(), hosts.end(), [&](const Host& one) { return one.name == host.name; }))
    refuse(where + ": " + host.name + " is named twice; name each machine once, with all its ranks");
  hosts.push_back(std::move(host));
  if (hosts.size() > kMostHosts) refuse(where + " names more than " + std::to_string(kMostHosts) + " machines");
}

/// Adds the numbers of "01-03", with their zeros.
void add_numbers(std::vector<std::string>& names, const std::string& prefix, const std::string& range,
                 const std::string& suffix) {
  const size_t dash = range.find('-');
  const std::string first = range.substr(0, dash), last = dash == std::string::npos ? first : range.substr(dash + 1);
  const int low = parse_number("Slurm's list of nodes", first, 0, 1 << 24);
  const int high = parse_number("Slurm's list of nodes", last, low, 1 << 24);
  for (int number = low; number <= high && names.size() < kMostHosts; ++number) {
    std::string digits = std::to_string(number);
    if (digits.size() < first.size()) digits.insert(0, first.size() - digits.size(), '0');
    names.push_back(prefix);
    names.back().append(digits).append(suffix);
  }
}

}  // namespace

std::vector<Host> parse_hosts(const std::string& text, int slots) {
  std::vector<Host> hosts;
  std::stringstream words(text);
  std::string word;
  if (text.ends_with(',')) refuse("--hosts " + text + " ends with a comma; name another machine, or leave it out");
  while (std::getline(words, word, ',')) {
    Host host{.name = word, .slots = slots};
    // "::1" is an address; a number of ranks follows the only colon, or the colon after a bracket.
    const size_t colon = word.rfind(':');
    const bool counted = colon != std::string::npos && (word.find(':') == colon || word[colon - 1] == ']');
    if (counted) {
      host.name = word.substr(0, colon);
      host.slots = parse_number("--hosts " + host.name, word.substr(colon + 1), 1, kMaxRanks);
    }
    if (host.name.size() > 2 && host.name.front() == '[' && host.name.back() == ']')
      host.name = host.name.substr(1, host.name.size() - 2);
    add_host(hosts, std::move(host), "--hosts");
  }
  if (hosts.empty()) refuse("--hosts takes machines and their numbers of ranks, such as node1:4,node2:4");
  return hosts;
}

std::vector<Host> read_hostfile(const std::string& path, int slots) {
  std::ifstream file(path);
  if (!file) refuse("--hostfile: " + path + " cannot be read");
  std::vector<Host> hosts;
  std::set<std::string> counted_lines;  // machines with a number
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    const std::string where = path + " line " + std::to_string(number);
    std::stringstream words(line.substr(0, line.find('#')));
    Host host{.name = "", .slots = slots};
    if (!(words >> host.name)) continue;
    std::string word;
    bool counted = false;
    const std::string what = where + " slots";
    while (words >> word) {
      if (word.starts_with("max_slots=") || word.starts_with("max-slots=")) continue;
      if (!word.starts_with("slots="))
        refuse(where + ": '" + word + "' is not supported; a line must be like `node1 slots=4`");
      host.slots = parse_number(what, word.substr(6), 1, kMaxRanks);
      counted = true;
    }
    // The lists of PBS and LSF have a line for each rank.
    const auto before =
        std::find_if(hosts.begin(), hosts.end(), [&](const Host& one) { return one.name == host.name; });
    if (before != hosts.end() && !counted && !counted_lines.contains(host.name)) {
      before->slots = std::min(before->slots + slots, kMaxRanks + 1);  // a number above a run's limit is refused later
      continue;
    }
    if (counted) counted_lines.insert(host.name);
    add_host(hosts, std::move(host), where);
  }
  if (hosts.empty()) refuse("--hostfile: " + path + " names no machine");
  return hosts;
}

std::vector<std::string> parse_slurm_nodes(const std::string& text) {
  std::vector<std::string> names;
  for (size_t start = 0; start < text.size();) {
    size_t end = start, depth = 0;
    for (; end < text.size() && (text[end] != ',' || depth > 0); ++end) {
      if (text[end] == '[') ++depth;
      if (text[end] == ']' && depth > 0) --depth;
    }
    const std::string word = text.substr(start, end - start);
    const size_t open = word.find('['), close = word.find(']');
    if (open == std::string::npos) {
      if (!word.empty()) names.push_back(word);
    } else if (close == std::string::npos || close < open) {
      refuse("Slurm's list of nodes, " + text + ", has an unmatched bracket");
    } else {
      std::stringstream ranges(word.substr(open + 1, close - open - 1));
      std::string range;
      while (std::getline(ranges, range, ',')) add_numbers(names, word.substr(0, open), range, word.substr(close + 1));
    }
    start = end + 1;
  }
  if (names.empty() || names.size() >= kMostHosts) refuse("Slurm's list of nodes, '" + text + "', cannot be read");
  return names;
}

}  // namespace lockstep::hosts
