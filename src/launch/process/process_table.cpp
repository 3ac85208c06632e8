#include "launch/process/process_table.h"

#include <unistd.h>

#include <cstdio>
#include <optional>
#include <string>
#include <unordered_map>

#include "base/proc_file.h"
#include "base/process_search.h"

namespace lockstep {
namespace {

/// Of /proc/<pid>/stat.
struct Stat {
  char state = 0;
  pid_t pid = 0, parent = 0, group = 0;
  uint64_t ticks = 0;  ///< of processor time, including children that it has waited for
};

std::optional<Stat> stat_of(pid_t pid) {
  const std::string text = process_stat(pid);
  Stat stat{.pid = pid};
  unsigned long user = 0, system = 0;
  long user_of_children = 0, system_of_children = 0;
  const int found = std::sscanf(text.c_str(), " %c %d %d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu %ld %ld", &stat.state,
                                &stat.parent, &stat.group, &user, &system, &user_of_children, &system_of_children);
  if (found != 7) return std::nullopt;
  stat.ticks = user + system + static_cast<uint64_t>(user_of_children + system_of_children);
  return stat;
}

std::vector<Stat> stats_of_all() {
  std::vector<Stat> stats;
  for (const pid_t pid : all_processes())
    if (const auto stat = stat_of(pid)) stats.push_back(*stat);
  return stats;
}

constexpr size_t kNobody = ~size_t{0};

/// Finds the family of each process: its group's, or else its parent's.
class Owners {
 public:
  Owners(const std::vector<Stat>& processes, const std::vector<ProcessFamily>& families) {
    for (const Stat& process : processes) processes_.emplace(process.pid, &process);
    for (size_t i = 0; i < families.size(); ++i) {
      groups_.emplace(families[i].group, i);
      if (families[i].member > 0) known_.emplace(families[i].member, i);
    }
  }

  size_t of(const Stat& process, int depth = 0) {
    if (const auto known = known_.find(process.pid); known != known_.end()) return known->second;
    size_t owner = kNobody;
    if (const auto group = groups_.find(process.group); group != groups_.end())
      owner = group->second;
    else if (const auto parent = processes_.find(process.parent); parent != processes_.end() && depth < kDeepest)
      owner = of(*parent->second, depth + 1);
    known_.emplace(process.pid, owner);
    return owner;
  }

 private:
  static constexpr int kDeepest = 1000;  // they were not all read at once, so parents could form a cycle

  std::unordered_map<pid_t, const Stat*> processes_;
  std::unordered_map<pid_t, size_t> groups_, known_;
};

}  // namespace

char process_state(pid_t pid) {
  const auto stat = stat_of(pid);
  return stat ? stat->state : '\0';
}

bool group_lives(pid_t group) {
  for (const Stat& process : stats_of_all())
    if (process.group == group && process.state != 'Z' && process.state != 'X') return true;
  return false;
}

std::vector<Clock::duration> processor_times(const std::vector<ProcessFamily>& families) {
  static const auto ticks_per_second = static_cast<uint64_t>(::sysconf(_SC_CLK_TCK));
  const auto processes = stats_of_all();
  Owners owners(processes, families);
  std::vector<uint64_t> ticks(families.size());
  for (const Stat& process : processes)
    if (const size_t owner = owners.of(process); owner != kNobody) ticks[owner] += process.ticks;
  std::vector<Clock::duration> times;
  for (const uint64_t sum : ticks) times.emplace_back(std::chrono::milliseconds(sum * 1000 / ticks_per_second));
  return times;
}

}  // namespace lockstep
