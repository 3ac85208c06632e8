#include "faultbox/processes.h"

#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <thread>

#include "base/clock.h"
#include "base/proc_file.h"
#include "base/process_search.h"

namespace lockstep::faultbox {
namespace {

namespace fs = std::filesystem;

struct Stat {
  char state = 0;
  pid_t parent = 0;
};

std::optional<Stat> stat_of(pid_t pid) {
  const std::string text = process_stat(pid);
  if (text.empty()) return std::nullopt;
  Stat stat;
  std::istringstream(text) >> stat.state >> stat.parent;
  return stat;
}

}  // namespace

int64_t now_ns() { return Clock::now().time_since_epoch().count(); }

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

bool eventually(const std::function<bool()>& condition, std::chrono::milliseconds timeout) {
  for (const Deadline deadline(timeout); !condition();) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

std::vector<pid_t> marked_processes(const std::string& mark) { return processes_with(mark); }

std::string variable_of(pid_t pid, const std::string& name) {
  const std::string block = '\0' + read_proc_file("/proc/" + std::to_string(pid) + "/environ");
  const size_t at = block.find('\0' + name + '=');
  return at == std::string::npos ? "" : block.c_str() + at + 2 + name.size();
}

std::string describe_process(pid_t pid) {
  std::string words = read_proc_file("/proc/" + std::to_string(pid) + "/cmdline");
  std::replace(words.begin(), words.end(), '\0', ' ');
  const auto stat = stat_of(pid);
  return std::to_string(pid) + ' ' + (stat ? stat->state : '?') + ' ' + words.substr(0, 100);
}

Holdings holdings_of(const std::vector<pid_t>& processes) {
  Holdings holdings;
  for (const pid_t pid : processes) {
    const std::string folder = "/proc/" + std::to_string(pid);
    std::error_code error;
    for (fs::directory_iterator entry(folder + "/fd", error), end; !error && entry != end; entry.increment(error)) {
      std::error_code gone;
      const std::string target = fs::read_symlink(entry->path(), gone).string();
      if (target.starts_with("socket:[")) holdings.sockets.insert(std::strtoull(target.c_str() + 8, nullptr, 10));
      if (target.starts_with("/dev/shm/") && !target.ends_with(" (deleted)")) holdings.named_segments.push_back(target);
    }
    std::istringstream maps(read_proc_file(folder + "/maps"));
    for (std::string line; std::getline(maps, line);)
      if (const size_t at = line.find("/dev/shm/"); at != std::string::npos && !line.ends_with(" (deleted)"))
        holdings.named_segments.push_back(line.substr(at));
  }
  return holdings;
}

std::vector<std::string> sockets_in_kernel(const std::set<ino_t>& sockets, bool any_state) {
  std::vector<std::string> found;
  const auto look = [&](const std::string& table, size_t state_at, const std::string& listening, size_t inode_at) {
    std::istringstream lines(read_proc_file("/proc/self/net/" + table));
    std::string line;
    std::getline(lines, line);  // the heading
    while (std::getline(lines, line)) {
      std::istringstream words(line);
      const std::vector<std::string> word{std::istream_iterator<std::string>(words), {}};
      if (word.size() <= inode_at) continue;
      const bool ours = sockets.contains(std::strtoull(word[inode_at].c_str(), nullptr, 10));
      if (ours && (any_state || word[state_at] == listening)) found.push_back(table + ": " + line);
    }
  };
  look("tcp", 3, "0A", 9);
  look("tcp6", 3, "0A", 9);
  look("unix", 3, "00010000", 6);  // its flags: __SO_ACCEPTCON
  return found;
}

size_t own_descriptors() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

std::vector<pid_t> reap_orphans(const std::set<pid_t>& kept) {
  std::vector<pid_t> alive;
  for (const pid_t pid : all_processes()) {
    const auto stat = stat_of(pid);
    if (!stat || stat->parent != ::getpid() || kept.contains(pid)) continue;
    if (stat->state == 'Z')
      ::waitpid(pid, nullptr, WNOHANG);
    else
      alive.push_back(pid);
  }
  return alive;
}

}  // namespace lockstep::faultbox
