#include "base/usable_cores.h"

#include <sched.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>

#include "base/error.h"
#include "base/proc_file.h"

namespace lockstep {
namespace {

double minimum_quota(double a, double b) { return a == 0 ? b : b == 0 ? a : std::min(a, b); }

double read_v2_quota(const std::filesystem::path& folder) {
  std::ifstream file(folder / "cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max" || period <= 0) return 0;
  return std::strtod(quota.c_str(), nullptr) / period;
}

double read_v1_quota(const std::filesystem::path& folder) {
  std::ifstream quota_file(folder / "cpu.cfs_quota_us"), period_file(folder / "cpu.cfs_period_us");
  double quota = 0, period = 0;
  if (!(quota_file >> quota) || !(period_file >> period) || quota <= 0 || period <= 0) return 0;
  return quota / period;
}

/// The smallest quota from `base`/`group` up to `base`.
template <typename Read>
double tightest_quota(const std::filesystem::path& base, const std::string& group, Read read_quota) {
  double tightest = read_quota(base);
  std::filesystem::path folder = base;
  for (const auto& part : std::filesystem::path(group).relative_path()) {
    folder /= part;
    tightest = minimum_quota(tightest, read_quota(folder));
  }
  return tightest;
}

}  // namespace

std::vector<int> allowed_cpus() {
  // The kernel refuses a mask smaller than its own; grow until it fits.
  for (int count = 1024; count <= 1 << 20; count *= 2) {
    cpu_set_t* set = CPU_ALLOC(count);
    const size_t bytes = CPU_ALLOC_SIZE(count);
    const bool ok = sched_getaffinity(0, bytes, set) == 0;
    std::vector<int> cpus;
    for (int cpu = 0; ok && cpu < count; ++cpu)
      if (CPU_ISSET_S(cpu, bytes, set)) cpus.push_back(cpu);
    CPU_FREE(set);
    if (ok) return cpus;
  }
  throw_errno("reading the CPU affinity mask");
}

double cgroup_cpu_quota(const std::string& root) {
  double quota = 0;
  for (const Cgroup& group : own_cgroups(root))
    if (group.is_v2())
      quota = minimum_quota(quota, tightest_quota(root + "/sys/fs/cgroup", group.path, read_v2_quota));
    else if (group.has("cpu"))
      quota = minimum_quota(quota, tightest_quota(root + "/sys/fs/cgroup/cpu", group.path, read_v1_quota));
  return quota;
}

int threads_per_rank(const std::vector<std::vector<int>>& masks, int local_rank, double quota) {
  std::map<int, int> sharers;
  for (const auto& mask : masks)
    for (int cpu : mask) ++sharers[cpu];
  double share = 0;
  for (int cpu : masks.at(local_rank)) share += 1.0 / sharers.at(cpu);
  if (quota > 0) share = std::min(share, quota / static_cast<double>(masks.size()));
  return std::max(1, static_cast<int>(share + 1e-9));
}

}  // namespace lockstep
