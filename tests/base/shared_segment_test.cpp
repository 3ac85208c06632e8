#include "base/shared_segment.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>

#include "base/error.h"

namespace lockstep {
namespace {

TEST(SharedSegment, TwoMappingsShareOneMemory) {
  SharedSegment mine("test", 1 << 20, 1 << 16);
  SharedSegment theirs(FileDescriptor(::fcntl(mine.fd(), F_DUPFD_CLOEXEC, 0)), 1 << 20);
  std::memcpy(mine.data() + 100, "hello", 6);
  EXPECT_STREQ(reinterpret_cast<const char*>(theirs.data() + 100), "hello");
  mine.commit(1 << 18);
  mine.data()[(1 << 18) - 1] = std::byte{7};
  EXPECT_EQ(theirs.data()[(1 << 18) - 1], std::byte{7});
}

TEST(SharedSegment, HasAPartApartThatIsCommittedWhenItIsNeeded) {
  constexpr size_t kSize = 1 << 20, kApart = 1 << 18;
  SharedSegment mine("test", kSize, 1 << 16, kApart);
  EXPECT_THROW(mine.commit(kSize - kApart + 1), Error);
  const auto blocks = [&] {
    struct stat status {};
    EXPECT_EQ(::fstat(mine.fd(), &status), 0);
    return static_cast<size_t>(status.st_blocks) * 512;
  };
  EXPECT_EQ(blocks(), size_t{1} << 16);
  mine.commit_apart(kSize - kApart / 2, kSize);
  EXPECT_EQ(blocks(), (size_t{1} << 16) + kApart / 2);
  SharedSegment theirs(FileDescriptor(::fcntl(mine.fd(), F_DUPFD_CLOEXEC, 0)), kSize);
  mine.data()[kSize - 1] = std::byte{7};
  EXPECT_EQ(theirs.data()[kSize - 1], std::byte{7});
  mine.commit(kSize - kApart);
  EXPECT_THROW(mine.commit_apart(kSize, kSize + 1), Error);
}

TEST(SharedSegment, IsSealedAndClosedOnExec) {
  SharedSegment segment("test", 1 << 16, 1 << 16);
  EXPECT_NE(::ftruncate(segment.fd(), 1 << 12), 0);
  EXPECT_NE(::ftruncate(segment.fd(), 1 << 20), 0);
  EXPECT_TRUE(::fcntl(segment.fd(), F_GETFD) & FD_CLOEXEC);
}

TEST(SharedSegment, TooLittleMemoryIsAnErrorWithBothSizes) {
  SharedSegment segment("test", size_t{1} << 45, 1 << 12);
  try {
    segment.commit(size_t{1} << 44);
    FAIL() << "committed 16 TiB";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("wanted 16777216 MiB"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("are available"), std::string::npos) << error.what();
  }
}

TEST(SharedSegment, WhatFailsLeavesNoMapping) {
  const size_t before = mapped_segment_bytes();
  EXPECT_THROW(SharedSegment("test", size_t{1} << 45, size_t{1} << 44), Error);  // more than there is to commit
  EXPECT_EQ(mapped_segment_bytes(), before);
  {
    SharedSegment segment("test", size_t{1} << 40, 1 << 12);
    EXPECT_EQ(mapped_segment_bytes(), before + (size_t{1} << 40));
    try {
      segment.commit((size_t{1} << 40) + 1);
      FAIL() << "committed more than was reserved";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("has address space for only 1048576 MiB;"), std::string::npos)
          << error.what();
    }
    try {
      SharedSegment("test", size_t{1} << 60, 1 << 12);
      FAIL() << "mapped more than there are addresses";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("of address space could not be mapped"), std::string::npos)
          << error.what();
      EXPECT_NE(std::string(error.what()).find("groups take 1048576 MiB"), std::string::npos) << error.what();
    }
  }
  EXPECT_EQ(mapped_segment_bytes(), before);
}

TEST(SharedSegment, RefusesAnUnsealedOrWronglySizedDescriptor) {
  FileDescriptor plain(::memfd_create("plain", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(plain.get(), 4096), 0);
  EXPECT_THROW(SharedSegment(FileDescriptor(::dup(plain.get())), 4096), Error);
  SharedSegment good("test", 4096, 4096);
  EXPECT_THROW(SharedSegment(FileDescriptor(::dup(good.fd())), 8192), Error);
}

TEST(SharedSegment, ChildOfForkNeitherSeesNorUnmapsIt) {
  auto segment = std::make_unique<SharedSegment>("test", 1 << 16, 1 << 16);
  const pid_t child = ::fork();
  if (child == 0) {
    segment.reset();
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  segment->data()[0] = std::byte{1};
}

}  // namespace
}  // namespace lockstep
