#include "collectives/intra_op.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <iterator>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "support/ranks.h"

namespace lockstep::intra_op_test {
namespace {

using testing::run_ranks;
using Part = std::pair<int64_t, int64_t>;

struct Parts {
  std::set<Part> parts;
  std::set<std::thread::id> threads;
};

Parts parts_of(int64_t count, int64_t grain) {
  std::mutex mutex;
  Parts all;
  intra_op_for(count, grain, [&](int64_t begin, int64_t end) {
    const std::lock_guard lock(mutex);
    all.parts.emplace(begin, end);
    all.threads.insert(std::this_thread::get_id());
  });
  return all;
}

size_t threads_of_process() {
  using Entries = std::filesystem::directory_iterator;
  return static_cast<size_t>(std::distance(Entries("/proc/self/task"), Entries()));
}

TEST(IntraOpFor, SharesOutBetweenThreads) {
  at::set_num_threads(3);
  for (const int64_t count : {3, 100, 100000}) {
    const auto [parts, threads] = parts_of(count, 1);
    EXPECT_EQ(threads.size(), 3);
    int64_t next = 0;
    for (const auto& [begin, end] : parts) {
      EXPECT_EQ(begin, next);
      next = end;
    }
    EXPECT_EQ(next, count);
  }
  at::set_num_threads(1);
  EXPECT_EQ(parts_of(100, 1).parts, (std::set<Part>{{0, 100}}));
}

TEST(IntraOpFor, KeepsSmallLoopsTogether) {
  at::set_num_threads(2);
  EXPECT_TRUE(parts_of(0, 1).parts.empty());
  EXPECT_EQ(parts_of(1, 1).parts, (std::set<Part>{{0, 1}}));
  EXPECT_EQ(parts_of(10, 10).parts, (std::set<Part>{{0, 10}}));
  EXPECT_EQ(parts_of(11, 10).parts.size(), 2);
}

TEST(IntraOpFor, RunsAloneWithinAnother) {
  at::set_num_threads(2);
  intra_op_for(2, 1, [](int64_t begin, int64_t end) {
    EXPECT_EQ(end, begin + 1);
    EXPECT_EQ(parts_of(10, 1).parts, (std::set<Part>{{0, 10}}));
  });
}

TEST(IntraOpFor, RethrowsTheException) {
  for (const int threads : {1, 2}) {
    at::set_num_threads(threads);
    const auto throws = [](int64_t /*begin*/, int64_t end) {
      if (end == 10) throw std::runtime_error("the last part");
    };
    EXPECT_THROW(intra_op_for(10, 1, throws), std::runtime_error);
  }
}

/// The rank's operators have used no threads before, so the sum starts them.
TEST(IntraOpFor, ServesASumOfResidentTensors) {
  for (const int ranks : {2, 3})
    run_ranks(ranks, [](const Context& context) {
      constexpr int64_t kElements = 1 << 20;
      at::set_num_threads(1);
      const at::Tensor sums = context.group().allocate(kElements, at::kFloat);
      sums.copy_(at::arange(kElements, at::kFloat) + context.rank());
      const int64_t n = context.world_size();
      const at::Tensor expected = at::arange(kElements, at::kFloat) * n + n * (n - 1) / 2;
      const size_t before = threads_of_process();
      at::set_num_threads(3);
      context.group().all_reduce(sums.narrow(0, 0, 1000));
      EXPECT_EQ(threads_of_process(), before);
      context.group().all_reduce(sums.narrow(0, 1000, kElements - 1000));
      EXPECT_EQ(threads_of_process(), before + 2);
      EXPECT_TRUE(sums.equal(expected));
    });
}

}  // namespace
}  // namespace lockstep::intra_op_test
