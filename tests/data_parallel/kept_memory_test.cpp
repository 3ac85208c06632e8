#include <lockstep/kept_memory.h>

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

namespace lockstep {
namespace {

/// Runs `body` in a process of its own, because it changes the allocator, and returns its result. SIGALRM ends one that
/// hangs.
int result_of(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    _exit(body());
  }
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/// Writes to 64 MiB of tensors and frees them; returns the page faults, 16,384 unless pages are large.
int64_t step() {
  rusage before{}, after{};
  ::getrusage(RUSAGE_SELF, &before);
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 16; ++i) tensors.push_back(at::empty({1 << 20}, at::kFloat).fill_(1));
  tensors.clear();
  ::getrusage(RUSAGE_SELF, &after);
  return after.ru_minflt - before.ru_minflt;
}

/// The process's resident memory in MiB.
int64_t resident_mib() {
  std::ifstream file("/proc/self/statm");
  int64_t all = 0, pages = 0;
  file >> all >> pages;
  return pages * ::sysconf(_SC_PAGESIZE) >> 20;
}

TEST(KeptMemory, StepsFindTheirPagesAgain) {
  const int result = result_of([] {
    step();
    if (step() < 5000) return 2;
    KeptMemory memory;
    int64_t faults = 0;
    for (int i = 0; i < 3; ++i) {
      faults = step();
      memory.end_step();
    }
    return faults < 100 ? 0 : 1;
  });
  if (result == 2) GTEST_SKIP() << "SKIPPED BECAUSE the kernel gives large pages here: a step has few faults anyway";
  EXPECT_EQ(result, 0);
}

TEST(KeptMemory, TheLastOneGivesAllBack) {
  EXPECT_EQ(result_of([] {
              step();
              const int64_t alone = resident_mib();
              auto first = std::make_unique<KeptMemory>();
              auto second = std::make_unique<KeptMemory>(KeptMemory());  // a moved one is one
              step();
              first.reset();
              if (resident_mib() < alone + 50) return 1;
              second.reset();
              return resident_mib() < alone + 14 ? 0 : 2;
            }),
            0);
}

TEST(KeptMemory, WhatNoStepNeedsGoesBack) {
  EXPECT_EQ(result_of([] {
              KeptMemory memory;
              step();
              const int64_t kept = resident_mib();
              for (int i = 0; i < 5; ++i) memory.end_step();
              return resident_mib() < kept - 50 ? 0 : 1;
            }),
            0);
}

}  // namespace
}  // namespace lockstep
