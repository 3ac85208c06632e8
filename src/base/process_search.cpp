#include "base/process_search.h"

#include <dirent.h>
#include <fcntl.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <thread>

#include "base/clock.h"
#include "base/file_descriptor.h"
#include "base/proc_file.h"

// An exec gives a process new memory before it places arguments and environment there; until then /proc/<pid>/environ
// is empty. Both ends of the environment in /proc/<pid>/stat are then 0, later both its beginning while the kernel
// counts the variables, and correct only once the code's beginning is set, which is set last. A descriptor opened
// before an exec ends there: a read after the exec is empty, and a read in pieces is cut off, while the two ends are
// already those of the new environment. So a read is complete only if the code has a beginning and the number of bytes
// equals the distance between the ends.

namespace lockstep {
namespace {

enum class Answer { kYes, kNo, kNotYet };

/// Fields of /proc/<pid>/stat, counted from the state on.
constexpr size_t kFlagsField = 6, kCodeBeginField = 23, kEnvironmentBeginField = 47, kEnvironmentEndField = 48;
constexpr uint64_t kIsEnding = 0x4, kIsOfTheKernel = 0x200000;

/// Whether a living process has, or will have, more environment than the `seen` bytes that were read.
bool will_show_more(pid_t pid, size_t seen) {
  std::istringstream stat(process_stat(pid));
  std::string state;
  stat >> state;
  if (state.empty() || state == "Z" || state == "X") return false;
  uint64_t value = 0, code = 0, begin = 0;
  for (size_t field = 1; field <= kEnvironmentEndField; ++field) {
    // Some fields are negative, but never these three.
    std::string word;
    if (!(stat >> word)) return false;
    value = std::strtoull(word.c_str(), nullptr, 10);
    if (field == kFlagsField && (value & (kIsEnding | kIsOfTheKernel)) != 0) return false;
    if (field == kCodeBeginField) code = value;
    if (field == kEnvironmentBeginField) begin = value;
  }
  return code == 0 || value == 0 || value - begin > seen;
}

/// Whether the environment contains these bytes. Each variable stands between two zeros.
Answer contains(pid_t pid, const std::string& bytes) {
  const std::string path = "/proc/" + std::to_string(pid) + "/environ";
  if (!FileDescriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC))) return Answer::kNo;
  const std::string block = read_proc_file(path);
  if (('\0' + block).find(bytes) != std::string::npos) return Answer::kYes;
  return will_show_more(pid, block.size()) ? Answer::kNotYet : Answer::kNo;
}

Answer has_variable(pid_t pid, const std::string& variable) {
  const Answer answer = contains(pid, '\0' + variable + '\0');
  if (answer != Answer::kYes) return answer;
  const std::string stat = process_stat(pid);
  const size_t state = stat.find_first_not_of(' ');
  return state == std::string::npos || stat[state] == 'Z' || stat[state] == 'X' ? Answer::kNo : Answer::kYes;
}

}  // namespace

bool was_started_with(pid_t pid, const std::string& name, std::chrono::milliseconds patience) {
  for (const Deadline deadline(patience);;) {
    const Answer answer = contains(pid, '\0' + name + '=');
    if (answer != Answer::kNotYet || deadline.passed()) return answer == Answer::kYes;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::vector<pid_t> all_processes() {
  std::vector<pid_t> processes;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc"), ::closedir);
  while (const dirent* entry = folder ? ::readdir(folder.get()) : nullptr) {
    char* end = nullptr;
    const long pid = std::strtol(entry->d_name, &end, 10);
    if (pid > 0 && *end == '\0') processes.push_back(static_cast<pid_t>(pid));
  }
  return processes;
}

std::vector<pid_t> processes_with(const std::string& variable, std::chrono::milliseconds patience) {
  std::vector<pid_t> found, asked = all_processes();
  for (const Deadline deadline(patience);;) {
    std::vector<pid_t> later;
    for (const pid_t pid : asked) {
      const Answer answer = has_variable(pid, variable);
      if (answer == Answer::kYes) found.push_back(pid);
      if (answer == Answer::kNotYet) later.push_back(pid);
    }
    if (later.empty() || deadline.passed()) break;
    asked = std::move(later);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace lockstep
