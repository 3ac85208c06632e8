#include "doctor_command.h"

#include <gnu/libc-version.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

#include "base/proc_file.h"
#include "base/processor.h"
#include "base/shared_segment.h"
#include "base/usable_cores.h"
#include "capture.h"
#include "launch/process/numa.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;

Json limit_of(__rlimit_resource resource) {
  rlimit limit{};
  ::getrlimit(resource, &limit);
  const auto value = [](rlim_t count) { return count == RLIM_INFINITY ? Json("unlimited") : Json(count); };
  return {{"soft", value(limit.rlim_cur)}, {"hard", value(limit.rlim_max)}};
}

/// The vector instructions used here by sums in shared memory.
std::string vector_instructions() {
  const std::string cpuinfo = read_proc_file("/proc/cpuinfo");
  std::istringstream flags(value_in(cpuinfo, "flags", ':') + " " + value_in(cpuinfo, "Features", ':'));
  const std::set<std::string> found{std::istream_iterator<std::string>(flags), {}};
  if (found.contains("avx512f") && found.contains("avx512bw")) return "AVX-512";
  return found.contains("avx2") ? "AVX2" : found.contains("asimd") ? "NEON" : "";
}

/// The first line that `command` prints; empty if there is no such program.
std::string first_line_of(const std::vector<std::string>& command) {
  const Captured said = capture(command, std::chrono::seconds(5));
  std::istringstream text(said.out.empty() ? said.err : said.out);
  std::string line;
  if (said.exit_code == 0) std::getline(text, line);
  return line;
}

/// Other launchers, by their names in PATH.
Json launchers() {
  Json found = Json::object();
  for (const char* name : {"mpirun", "mpirun.openmpi", "mpirun.mpich", "mpiexec.hydra", "srun", "torchrun"}) {
    if (std::string(name) == "torchrun") {
      // Running it would load Python's torch, which takes seconds.
      const std::string path = first_line_of({"sh", "-c", "command -v torchrun"});
      if (!path.empty()) found[name] = path;
      continue;
    }
    std::string version = first_line_of({name, "--version"});
    // "HYDRA build details:": MPICH has its version in the next line.
    if (version.starts_with("HYDRA"))
      version = first_line_of({"sh", "-c", std::string(name) + " --version | sed -n 's/.*Version: */MPICH /p'"});
    // "mpirun.openmpi (OpenRTE) 4.1.4": Open MPI before its version 5 names only its launcher.
    if (const size_t end = version.find("(OpenRTE)"); end != std::string::npos)
      version = "Open MPI" + version.substr(end + std::string("(OpenRTE)").size());
    if (!version.empty()) found[name] = version;
  }
  return found;
}

Json cgroup_memory_limit() {
  // The smallest on the path to the root of cgroup v2.
  std::ifstream groups("/proc/self/cgroup");
  Json smallest;
  for (std::string line; std::getline(groups, line);) {
    if (!line.starts_with("0::")) continue;
    for (std::string group = line.substr(3); !group.empty(); group.resize(group.rfind('/'))) {
      uint64_t bytes = 0;
      if (std::ifstream("/sys/fs/cgroup" + group + "/memory.max") >> bytes)
        smallest = smallest.is_null() ? bytes : std::min(smallest.get<uint64_t>(), bytes);
      if (group == "/") break;
    }
  }
  return smallest;
}

}  // namespace

int count_gpus(const std::string& visible, const std::string& folder) {
  int there = 0;
  while (std::filesystem::exists(folder + "/nvidia" + std::to_string(there))) ++there;
  if (visible == "-") return there;
  const auto named = visible.empty() ? 0 : 1 + std::count(visible.begin(), visible.end(), ',');
  return std::min(there, static_cast<int>(named));
}

Json machine_facts() {
  utsname system{};
  ::uname(&system);
  Json nodes = Json::array();
  for (const NumaNode& node : numa_nodes()) nodes.push_back({{"node", node.number}, {"cpus", node.cpus.size()}});
  const double quota = cgroup_cpu_quota();
  const auto usable = allowed_cpus();
  std::string ptrace_scope;
  std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> ptrace_scope;
  return {
      {"system",
       {{"kernel", std::string(system.sysname) + " " + system.release + " " + system.machine},
        {"distribution", value_in(read_proc_file("/etc/os-release"), "PRETTY_NAME", '=')},
        {"glibc", ::gnu_get_libc_version()}}},
      {"processor", {{"name", processor_name()}, {"vectors", vector_instructions()}}},
      {"cores",
       {{"usable", usable.size()},
        {"online", ::sysconf(_SC_NPROCESSORS_ONLN)},
        {"quota", quota > 0 ? Json(quota) : Json(nullptr)},
        {"auto_ranks", threads_per_rank({usable}, 0, quota)}}},
      {"numa_nodes", nodes},
      {"memory",
       {{"total_bytes",
         static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE))},
        {"available_bytes", available_memory_bytes()},
        {"cgroup_limit_bytes", cgroup_memory_limit()}}},
      {"limits",
       {{"descriptors", limit_of(RLIMIT_NOFILE)},
        {"processes", limit_of(RLIMIT_NPROC)},
        {"locked_memory_bytes", limit_of(RLIMIT_MEMLOCK)},
        {"address_space_bytes", limit_of(RLIMIT_AS)},
        {"file_bytes", limit_of(RLIMIT_FSIZE)}}},
      {"ptrace_scope", ptrace_scope.empty() ? Json(nullptr) : Json(ptrace_scope)},
      {"launchers", launchers()},
  };
}

}  // namespace lockstep
