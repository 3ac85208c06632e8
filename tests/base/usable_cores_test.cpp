#include "base/usable_cores.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace lockstep {
namespace {

TEST(ThreadsPerRank, UnboundRanksShareTheCores) {
  const std::vector<int> all{0, 1, 2, 3};
  EXPECT_EQ(threads_per_rank({all, all}, 0, 0), 2);
  EXPECT_EQ(threads_per_rank({all, all, all}, 2, 0), 1);
  EXPECT_EQ(threads_per_rank({all}, 0, 0), 4);
}

TEST(ThreadsPerRank, BoundRanksKeepTheirOwnCores) {
  EXPECT_EQ(threads_per_rank({{0, 1}, {2, 3}}, 0, 0), 2);
  EXPECT_EQ(threads_per_rank({{0}, {1}}, 1, 0), 1);
}

TEST(ThreadsPerRank, MoreRanksThanCoresStillGetOne) { EXPECT_EQ(threads_per_rank({{0}, {0}, {0}, {0}}, 3, 0), 1); }

TEST(ThreadsPerRank, QuotaIsSharedByAll) {
  const std::vector<int> all{0, 1, 2, 3, 4, 5, 6, 7};
  EXPECT_EQ(threads_per_rank({all, all}, 0, 4.0), 2);
  EXPECT_EQ(threads_per_rank({all, all}, 0, 0.5), 1);
}

class CgroupQuota : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = std::filesystem::temp_directory_path() / ("lockstep_cgroup_" + std::to_string(::getpid()));
    std::filesystem::create_directories(root_ / "proc/self");
  }
  void TearDown() override { std::filesystem::remove_all(root_); }
  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  std::filesystem::path root_;
};

TEST_F(CgroupQuota, Version2TakesTheTightestParent) {
  write("proc/self/cgroup", "0::/outer/inner\n");
  write("sys/fs/cgroup/outer/cpu.max", "150000 100000\n");
  write("sys/fs/cgroup/outer/inner/cpu.max", "max 100000\n");
  EXPECT_DOUBLE_EQ(cgroup_cpu_quota(root_), 1.5);
}

TEST_F(CgroupQuota, Version1) {
  write("proc/self/cgroup", "4:cpu,cpuacct:/box\n0::/\n");
  write("sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "200000\n");
  write("sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000\n");
  EXPECT_DOUBLE_EQ(cgroup_cpu_quota(root_), 2.0);
}

TEST_F(CgroupQuota, NoneIsZero) {
  write("proc/self/cgroup", "0::/\n");
  EXPECT_DOUBLE_EQ(cgroup_cpu_quota(root_), 0.0);
}

TEST(AllowedCpus, IsNeverEmpty) { EXPECT_FALSE(allowed_cpus().empty()); }

}  // namespace
}  // namespace lockstep
