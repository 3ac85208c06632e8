#include "observe/system_facts.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/proc_file.h"
#include "base/processor.h"
#include "base/usable_cores.h"
#include "base/version.h"

namespace lockstep {
namespace {

int64_t memory_bytes() {
  int64_t kibibytes = 0;
  std::istringstream(value_in(read_proc_file("/proc/meminfo"), "MemTotal", ':')) >> kibibytes;
  return kibibytes * 1024;
}

std::vector<std::string> command_line() {
  std::ifstream file("/proc/self/cmdline");
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  return words;
}

}  // namespace

SystemFacts system_facts() {
  utsname names{};
  const bool named = ::uname(&names) == 0;
  std::error_code ignored;
  return {
      .host = named ? names.nodename : "",
      .system = value_in(read_proc_file("/etc/os-release"), "PRETTY_NAME", '='),
      .kernel = named ? std::string(names.sysname) + " " + names.release + " " + names.machine : "",
      .cpu = processor_name(),
      .usable_cores = static_cast<int>(allowed_cpus().size()),
      .memory_bytes = memory_bytes(),
      .pid = ::getpid(),
      .folder = std::filesystem::current_path(ignored).string(),
      .command = command_line(),
      .lockstep_version = library_version(),
  };
}

}  // namespace lockstep
