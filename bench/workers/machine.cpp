#include "workers/machine.h"

#include <sched.h>
#include <sys/utsname.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace lockstep::bench {
namespace {

volatile std::sig_atomic_t interrupted = 0;

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown";
}

}  // namespace

ScratchFolder::ScratchFolder(const std::string& name) {
  path_ = "/tmp/" + name + ".XXXXXX";
  if (mkdtemp(path_.data()) == nullptr) throw std::runtime_error("no folder can be made under /tmp");
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

int usable_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

nlohmann::ordered_json host_facts() {
  utsname system{};
  uname(&system);
  double load = 0;
  getloadavg(&load, 1);
  const auto cache = [](const char* index) {
    std::ifstream file(std::string("/sys/devices/system/cpu/cpu0/cache/") + index + "/size");
    std::string size = "unknown";
    file >> size;
    return size;
  };
  return {{"cpu", cpu_model()},          {"cores", usable_cores()},  {"l2_cache", cache("index2")},
          {"l3_cache", cache("index3")}, {"kernel", system.release}, {"load_average_before", load}};
}

std::string build_folder() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path().parent_path().string();
}

void remember_interrupts() {
  for (const int signal : {SIGINT, SIGTERM}) std::signal(signal, [](int) { interrupted = 1; });
}

void check_interrupts() {
  if (interrupted != 0) throw std::runtime_error("interrupted");
}

}  // namespace lockstep::bench
