#include "collectives/ancestor.h"

#include <unistd.h>

#include <iterator>
#include <sstream>
#include <vector>

#include "base/proc_file.h"
#include "base/process_search.h"

namespace lockstep {
namespace {

/// The fields of /proc/<pid>/stat from the third on.
std::vector<std::string> stat_fields(int pid) {
  std::istringstream stream(process_stat(pid));
  return {std::istream_iterator<std::string>(stream), {}};
}

constexpr size_t kParent = 1, kStartTime = 19;  // counted from the third field

}  // namespace

std::string starting_process(const std::string& variable) {
  int pid = ::getppid();
  while (pid > 1 && was_started_with(pid, variable)) {
    const auto fields = stat_fields(pid);
    if (fields.size() <= kStartTime) break;
    pid = std::stoi(fields[kParent]);
  }
  const auto fields = stat_fields(pid);
  return std::to_string(pid) + "-" + (fields.size() > kStartTime ? fields[kStartTime] : "0");
}

}  // namespace lockstep
