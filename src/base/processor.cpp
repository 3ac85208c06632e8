#include "base/processor.h"

#include <sys/utsname.h>

#include <fstream>
#include <set>

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
  std::string first_ones(4096, '\0');  // on a machine with hundreds of processors, writing them all takes milliseconds
  std::ifstream file("/proc/cpuinfo");
  file.read(first_ones.data(), static_cast<std::streamsize>(first_ones.size()));
  first_ones.resize(static_cast<size_t>(file.gcount()));
  if (std::string name = processor_name_in(first_ones); !name.empty()) return name;
  utsname names{};
  return ::uname(&names) == 0 ? names.machine : "unknown";
}

std::string warning_of_other_processors(const std::vector<MachineProcessor>& machines) {
  std::set<std::string> named;
  std::string others;
  for (const auto& [machine, processor] : machines)
    if (processor != machines.front().processor && named.insert(machine).second)
      others += (others.empty() ? "" : ", ") + machine;
  if (others.empty()) return "";
  return others + (named.size() == 1 ? " has" : " have") + " another processor than " + machines.front().machine +
         ": results may differ in the last bits from those of equal machines";
}

}  // namespace lockstep
