#include "base/huge_pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <fstream>
#include <string>
#include <vector>

namespace lockstep {
namespace {

/// Small pages that hold bytes of a formula.
class Pages {
 public:
  explicit Pages(size_t bytes) : bytes_(bytes) {
    data_ = static_cast<char*>(
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    ::madvise(data_, bytes, MADV_NOHUGEPAGE);
    for (size_t i = 0; i < bytes; ++i) data_[i] = byte(i);
    ::madvise(data_, bytes, MADV_HUGEPAGE);
  }
  ~Pages() { ::munmap(data_, bytes_); }

  char* data() const { return data_; }
  bool are_as_they_were() const {
    for (size_t i = 0; i < bytes_; ++i)
      if (data_[i] != byte(i)) return false;
    return true;
  }
  /// In KiB, as the kernel says.
  long in_huge_pages() const {
    std::ifstream file("/proc/self/smaps");
    bool here = false;
    const auto address = reinterpret_cast<uintptr_t>(data_);
    for (std::string line; std::getline(file, line);) {
      char* rest = nullptr;
      const uintptr_t begin = std::strtoull(line.c_str(), &rest, 16);
      if (*rest == '-') here = begin <= address && address < std::strtoull(rest + 1, nullptr, 16);
      if (here && line.rfind("AnonHugePages:", 0) == 0) return std::stol(line.substr(14));
    }
    return 0;
  }

 private:
  static char byte(size_t i) { return static_cast<char>(i * 31 >> 5); }
  char* data_;
  const size_t bytes_;
};

/// Whether the kernel gathers pages when it is asked to, and has huge ones left: asked here, not by what is tested.
bool kernel_gathers() {
  constexpr int kMadvCollapse = 25;
  const Pages pages(3 * kHugePage);
  const auto begin = reinterpret_cast<uintptr_t>(pages.data());
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  return ::madvise(pages.data() + (first - begin), kHugePage, kMadvCollapse) == 0 && pages.in_huge_pages() > 0;
}

Deadline soon() { return Deadline(std::chrono::seconds(10)); }

TEST(HugePages, WhatLiesThereStaysAsItIs) {
  const Pages pages(4 * kHugePage + 12345);
  gather_into_huge_pages(pages.data() + 4097, 3 * kHugePage + 7, soon());
  gather_into_huge_pages(pages.data(), 10, soon());
  EXPECT_TRUE(pages.are_as_they_were());
}

TEST(HugePages, WholePagesAreGatheredUnlessItIsTooLate) {
  if (!kernel_gathers()) GTEST_SKIP() << "SKIPPED BECAUSE this kernel gathers no pages, or has no huge ones left";
  const Pages pages(4 * kHugePage);
  const long before = pages.in_huge_pages();
  gather_into_huge_pages(pages.data(), 4 * kHugePage, Deadline(std::chrono::milliseconds(0)));
  EXPECT_EQ(pages.in_huge_pages(), before);
  gather_into_huge_pages(pages.data(), 4 * kHugePage, soon());
  EXPECT_GE(pages.in_huge_pages(), static_cast<long>(3 * kHugePage >> 10));
}

}  // namespace
}  // namespace lockstep
