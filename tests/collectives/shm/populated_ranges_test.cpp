#include "collectives/shm/segment/populated_ranges.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include "collectives/shm/board.h"
#include "collectives/shm/local_world.h"
#include "collectives/shm/segment/bootstrap.h"

// Which pages of the others' memory a rank has in its page table.
namespace lockstep::shm {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kMiB = size_t{1} << 20;

/// Bytes of [begin, begin + bytes) that are in this process's page table.
size_t entered(const std::byte* begin, size_t bytes) {
  const FileDescriptor file(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  std::vector<uint64_t> pages(bytes / kPageBytes);
  const size_t wanted = pages.size() * sizeof(uint64_t);
  const auto at = static_cast<off_t>(reinterpret_cast<uintptr_t>(begin) / kPageBytes * sizeof(uint64_t));
  if (::pread(file.get(), pages.data(), wanted, at) != static_cast<ssize_t>(wanted))
    throw std::runtime_error("/proc/self/pagemap cannot be read");
  size_t present = 0;
  for (uint64_t page : pages) present += page >> 63;
  return present * kPageBytes;
}

TEST(PopulatedRanges, PopulateEachPageOnce) {
  constexpr size_t kBytes = 64 * kPageBytes;
  SharedSegment mine("test", kBytes, kBytes);
  SharedSegment theirs(FileDescriptor(::fcntl(mine.fd(), F_DUPFD_CLOEXEC, 0)), kBytes);
  const auto pages = [&](size_t begin, size_t end) {
    return entered(theirs.data() + begin * kPageBytes, (end - begin) * kPageBytes) / kPageBytes;
  };
  if (entered(mine.data(), kBytes) != kBytes) GTEST_SKIP() << "SKIPPED BECAUSE this kernel does not populate mappings";
  PopulatedRanges ranges;
  ranges.populate(theirs, 10 * kPageBytes + 100, 12 * kPageBytes - 100);
  ranges.populate(theirs, 10 * kPageBytes, 10 * kPageBytes);  // nothing
  if (pages(0, 64) == 64) GTEST_SKIP() << "SKIPPED BECAUSE this kernel gives huge pages to all shared memory";
  EXPECT_EQ(pages(0, 64), 2u);
  EXPECT_EQ(pages(10, 12), 2u);
  ranges.populate(theirs, 20 * kPageBytes, 22 * kPageBytes);
  ranges.populate(theirs, 30 * kPageBytes, 31 * kPageBytes);
  EXPECT_EQ(pages(0, 64), 5u);
  // What lies between, before and after; the ranges it joins are one range from here on.
  ranges.populate(theirs, 9 * kPageBytes, 25 * kPageBytes);
  EXPECT_EQ(pages(9, 25), 16u);
  EXPECT_EQ(pages(0, 64), 17u);
  ranges.populate(theirs, 0, kBytes);
  EXPECT_EQ(pages(0, 64), 64u);
}

class Neighbours : public ::testing::TestWithParam<int> {};

// Every rank populated its page table with all other ranks' whole buffers, though it writes only to its slice: on 64
// ranks with 4 GiB each that was 512 MiB of page tables for each rank.
TEST_P(Neighbours, EnterTheirSliceOfABufferThatIsReducedInPlace) {
  const int ranks = GetParam();
  const auto n = static_cast<size_t>(ranks);
  Board board(ranks);
  on_threads(ranks, [&](int rank) {  // each with its own mapping of every segment
    int round = 0;
    Communicator group(
        bootstrap(rank, ranks, [&](const std::string& mine) { return board.all_gather(rank, round, mine); },
                  {.timeout = std::chrono::seconds(20), .resident_bytes = 64 * kMiB}),
        std::make_shared<ProgressSet>());
    constexpr size_t kBytes = 48 * kMiB, kSlack = 4 * kMiB;  // a huge page at either end
    std::byte* buffer = group.allocate(kBytes);
    const size_t count = kBytes / sizeof(int32_t);
    auto* values = reinterpret_cast<int32_t*>(buffer);
    const auto reduce = [&](size_t first, size_t elements) {
      for (size_t i = 0; i < elements; ++i) values[first + i] = rank + static_cast<int>(i % 1000);
      group.run({.kind = OperationKind::kAllReduce,
                 .type = DataType::kInt32,
                 .count = elements,
                 .input = values + first,
                 .output = values + first},
                kTestTimeout);
      for (size_t i = 0; i < elements; ++i)
        if (values[first + i] != ranks * (ranks - 1) / 2 + ranks * static_cast<int>(i % 1000)) {
          FAIL() << "wrong sum of element " << first + i;
        }
    };
    const auto of_peer = [&](int peer) {
      return entered(group.world().resident(peer), 64 * kMiB);  // beyond the buffer there is nothing
    };
    reduce(0, count);
    reduce(0, count);
    for (int peer = 0; peer < ranks; ++peer) {
      if (peer == rank) continue;
      EXPECT_LE(of_peer(peer), kBytes / n + kSlack) << "of rank " << peer << " by rank " << rank;
    }
    // Parts of the buffer, whose slices lie elsewhere, add theirs.
    reduce(count / 4, 1000);
    reduce(count / 2, count / 2);
    for (int peer = 0; peer < ranks; ++peer) {
      if (peer == rank) continue;
      EXPECT_LE(of_peer(peer), kBytes / n + kBytes / 2 / n + 2 * kSlack);
    }
    group.run({.kind = OperationKind::kBarrier}, kTestTimeout);
    group.free(buffer);
  });
}

// Other operations populate what they read.
TEST_P(Neighbours, ReadTheirBlockOfAReduceScatter) {
  const int ranks = GetParam();
  const auto n = static_cast<size_t>(ranks);
  Board board(ranks);
  on_threads(ranks, [&](int rank) {
    int round = 0;
    Communicator group(
        bootstrap(rank, ranks, [&](const std::string& mine) { return board.all_gather(rank, round, mine); },
                  {.timeout = std::chrono::seconds(20), .resident_bytes = 64 * kMiB}),
        std::make_shared<ProgressSet>());
    constexpr size_t kBytes = 48 * kMiB, kSlack = 4 * kMiB;
    const size_t count = kBytes / n / sizeof(int32_t);
    auto* values = reinterpret_cast<int32_t*>(group.allocate(kBytes));
    std::fill(values, values + count * n, rank + 1);
    std::vector<int32_t> sum(count);
    group.run({.kind = OperationKind::kReduceScatter,
               .type = DataType::kInt32,
               .count = count,
               .input = values,
               .output = sum.data()},
              kTestTimeout);
    for (int32_t x : sum) ASSERT_EQ(x, ranks * (ranks + 1) / 2);
    for (int peer = 0; peer < ranks; ++peer) {
      if (peer == rank) continue;
      const size_t bytes = entered(group.world().resident(peer), 64 * kMiB);
      EXPECT_LE(bytes, kBytes / n + kSlack) << "of rank " << peer << " by rank " << rank;
      EXPECT_GE(bytes, kBytes / n / 2);
    }
    group.run({.kind = OperationKind::kBarrier}, kTestTimeout);
    group.free(values);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Neighbours, ::testing::Values(2, 3));

}  // namespace
}  // namespace lockstep::shm
