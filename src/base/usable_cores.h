#pragma once

#include <string>
#include <vector>

namespace lockstep {

/// Numbers of the CPUs this process may run on (its affinity mask), ascending.
std::vector<int> allowed_cpus();

/// The number of CPUs' worth of time that the cgroup quota grants this process and its siblings, or 0 without a quota.
/// Reads cgroup v2 (cpu.max of this group and its parents) and v1 (cpu.cfs_quota_us). `root` is for tests.
double cgroup_cpu_quota(const std::string& root = "");

/// The number of threads that a rank should use: its fair share of the CPUs on which it may run, at least 1. `masks`
/// holds the allowed CPUs of every rank on this machine; this rank's are at `local_rank`. A CPU that k of them may use
/// counts as 1/k, and a quota (0: none) is shared by all. So both unbound ranks and ranks bound to cores by their
/// launcher get their fair share.
int threads_per_rank(const std::vector<std::vector<int>>& masks, int local_rank, double quota);

}  // namespace lockstep
