#include "launch/process/numa.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <climits>
#include <filesystem>
#include <fstream>

namespace lockstep {
namespace {

constexpr int kMaxCpu = 1 << 20;

std::string first_line(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

}  // namespace

std::vector<int> parse_cpu_list(std::string_view text) {
  std::vector<int> cpus;
  const char *at = text.data(), *const end = at + text.size();
  while (at < end) {
    int first = 0;
    const auto begin = std::from_chars(at, end, first);
    if (begin.ec != std::errc() || first < 0 || first > kMaxCpu) break;
    int last = first;
    at = begin.ptr;
    if (at < end && *at == '-') {
      const auto rest = std::from_chars(at + 1, end, last);
      if (rest.ec != std::errc() || last < first || last > kMaxCpu) break;
      at = rest.ptr;
    }
    for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
    if (cpus.size() > kMaxCpu || at == end || *at != ',') break;
    ++at;
  }
  std::sort(cpus.begin(), cpus.end());
  cpus.erase(std::unique(cpus.begin(), cpus.end()), cpus.end());
  return cpus;
}

std::vector<NumaNode> numa_nodes(const std::string& root) {
  namespace fs = std::filesystem;
  std::vector<NumaNode> nodes;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(root + "/sys/devices/system/node", none)) {
    const std::string name = entry.path().filename().string();
    int number = 0;
    if (!name.starts_with("node")) continue;
    const auto [end, error] = std::from_chars(name.data() + 4, name.data() + name.size(), number);
    if (error != std::errc() || end != name.data() + name.size()) continue;
    auto cpus = parse_cpu_list(first_line(entry.path() / "cpulist"));
    if (!cpus.empty()) nodes.push_back({number, std::move(cpus)});
  }
  if (nodes.empty()) nodes.push_back({0, parse_cpu_list(first_line(root + "/sys/devices/system/cpu/online"))});
  std::sort(nodes.begin(), nodes.end(), [](const auto& a, const auto& b) { return a.number < b.number; });
  return nodes;
}

bool prefer_memory_of(int node) {
  constexpr int kBits = sizeof(unsigned long) * CHAR_BIT;
  unsigned long mask[16] = {};
  if (node < 0 || node >= 16 * kBits) return false;
  mask[node / kBits] = 1UL << (node % kBits);
  // The kernel expects one more than the number of bits.
  return ::syscall(SYS_set_mempolicy, MPOL_PREFERRED, mask, 16UL * kBits + 1) == 0;
}

}  // namespace lockstep
