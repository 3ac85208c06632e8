#include "base/processor.h"

#include <sys/utsname.h>

#include <sstream>

#include "base/proc_file.h"

namespace lockstep {
namespace {

/// The value of the first line "key : value"; empty: there is none.
std::string value_of(const std::string& text, const std::string& key) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t colon = line.find(':');
    if (!line.starts_with(key) || colon == std::string::npos) continue;
    if (line.find_last_not_of(" \t", colon - 1) + 1 != key.size()) continue;
    const size_t start = line.find_first_not_of(" \t", colon + 1);
    return start == std::string::npos ? "" : line.substr(start);
  }
  return "";
}

}  // namespace

std::string processor_name_in(const std::string& cpuinfo) {
  if (std::string name = value_of(cpuinfo, "model name"); !name.empty()) return name;
  const std::string part = value_of(cpuinfo, "CPU part");
  if (part.empty()) return "";
  return "ARM, implementer " + value_of(cpuinfo, "CPU implementer") + ", part " + part + ", variant " +
         value_of(cpuinfo, "CPU variant");
}

std::string processor_name() {
  if (std::string name = processor_name_in(read_proc_file("/proc/cpuinfo")); !name.empty()) return name;
  utsname names{};
  return ::uname(&names) == 0 ? names.machine : "unknown";
}

}  // namespace lockstep
