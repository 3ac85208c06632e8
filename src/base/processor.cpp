#include "base/processor.h"

#include <sys/utsname.h>

#include "base/proc_file.h"

namespace lockstep {
std::string processor_name_in(const std::string& cpuinfo) {
  if (std::string name = value_in(cpuinfo, "model name", ':'); !name.empty()) return name;
  const std::string part = value_in(cpuinfo, "CPU part", ':');
  if (part.empty()) return "";
  return "ARM, implementer " + value_in(cpuinfo, "CPU implementer", ':') + ", part " + part + ", variant " +
         value_in(cpuinfo, "CPU variant", ':');
}

std::string processor_name() {
  if (std::string name = processor_name_in(read_proc_file("/proc/cpuinfo")); !name.empty()) return name;
  utsname names{};
  return ::uname(&names) == 0 ? names.machine : "unknown";
}

}  // namespace lockstep
