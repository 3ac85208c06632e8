#include "base/proc_file.h"

#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

namespace lockstep {
namespace {

TEST(ProcFile, AllOfAFileWhoseSizeTheKernelDoesNotTell) {
  std::ifstream file("/proc/cpuinfo");
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  EXPECT_NE(read_proc_file("/proc/cpuinfo").find(bytes.substr(0, bytes.find('\n'))), std::string::npos);
  EXPECT_TRUE(read_proc_file("/proc/self/stat").starts_with(std::to_string(::getpid()) + " ("));
  EXPECT_GT(read_proc_file("/proc/self/smaps").size(), 4096U);
}

TEST(ProcFile, TheStatOfAProcessIsReadBehindItsName) {
  ASSERT_EQ(::prctl(PR_SET_NAME, ") Z 1 (", 0, 0, 0), 0);
  std::istringstream fields(process_stat(::getpid()));
  std::string state;
  int parent = 0;
  fields >> state >> parent;
  EXPECT_EQ(state, "R");
  EXPECT_EQ(parent, ::getppid());
  EXPECT_EQ(process_stat(0), "");
}

TEST(ProcFile, WhatCannotBeReadIsEmpty) {
  EXPECT_EQ(read_proc_file("/proc/0/stat"), "");
  EXPECT_EQ(read_proc_file("/proc/self/mem"), "")
      << "opens, but nothing can be read at 0, as of a process that is gone";
}

}  // namespace
}  // namespace lockstep
