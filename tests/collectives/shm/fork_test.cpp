#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <thread>

#include "base/error.h"
#include "collectives/shm/forked_ranks.h"

// Children that a rank forks: they have no part in its groups, whatever its other threads were doing, and do no harm.
namespace lockstep::shm {
namespace {

class Fork : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Fork, ::testing::Values(2, 3));

void expect_all_end_well(const std::vector<pid_t>& children) {
  for (pid_t child : children) EXPECT_EQ(exit_code(child, std::chrono::seconds(60)), 0);
}

TEST_P(Fork, AChildOfARankIsHarmless) {
  const int ranks = GetParam();
  Board board(ranks);
  const auto children = fork_ranks(ranks, [&](int rank) {
    int round = 0;
    Communicator group(join(board, rank, ranks, round));
    sum_of_ranks(group, 1000);
    const auto grandchildren = fork_ranks(1, [&](int) {
      try {
        sum_of_ranks(group, 1);
        return 1;
      } catch (const Error&) {
      }
      group.~Communicator();  // as exit() would, were it a global
      return 0;
    });
    const int code = exit_code(grandchildren[0], std::chrono::seconds(10));
    sum_of_ranks(group, 1000);
    return code;
  });
  expect_all_end_well(children);
}

// Another thread that waits in a group holds the mutex of all groups of the process most of the time. A child where it
// stays locked must not wait for it, neither when a group is destroyed nor when the child makes its own.
TEST_P(Fork, AChildDoesNotHangOnAMutexThatAnotherThreadHeld) {
  const int ranks = GetParam();
  Board board(ranks), own_board(1);
  const auto children = fork_ranks(ranks, [&](int rank) {
    int round = 0;
    Communicator a(join(board, rank, ranks, round)), b(join(board, rank, ranks, round));
    std::atomic<bool> over{false};
    std::thread holder([&] {
      while (!over.load()) ProgressSet::process()->progress_others(nullptr);
    });
    int worst = 0;
    for (int i = 0; i < 40 && worst == 0; ++i) {
      const auto grandchildren = fork_ranks(1, [&](int) {
        a.~Communicator();
        Board alone(1);
        int own_round = 0;
        Communicator own(join(alone, 0, 1, own_round)), another(join(alone, 0, 1, own_round));
        return sum_of_ranks(own, 10) == 0 && sum_of_ranks(another, 10) == 0 ? 0 : 1;
      });
      worst = exit_code(grandchildren[0], std::chrono::seconds(5));
    }
    over.store(true);
    holder.join();
    if (sum_of_ranks(a, 1000) != ranks * (ranks - 1) / 2) return 2;
    return worst == 0 ? 0 : 3;
  });
  expect_all_end_well(children);
}

// Tensors lie in a group's memory. A child has copies of what its parent had: it can read them, and only the child sees
// what it writes.
TEST_P(Fork, AChildHasCopiesOfWhatWasHandedOut) {
  const int ranks = GetParam();
  Board board(ranks);
  const auto children = fork_ranks(ranks, [&](int rank) {
    int round = 0;
    Communicator group(join(board, rank, ranks, round));
    const size_t count = 100'000;
    auto* x = reinterpret_cast<int32_t*>(group.allocate(count * sizeof(int32_t)));
    std::iota(x, x + count, rank);
    const auto grandchildren = fork_ranks(1, [&](int) {
      for (size_t i = 0; i < count; ++i)
        if (x[i] != static_cast<int32_t>(i) + rank) return 1;
      std::fill(x, x + count, -1);
      group.free(x);
      return x[count / 2] == -1 ? 0 : 2;
    });
    if (const int code = exit_code(grandchildren[0], std::chrono::seconds(20)); code != 0) return code;
    for (size_t i = 0; i < count; ++i)
      if (x[i] != static_cast<int32_t>(i) + rank) return 3;
    if (sum_of_ranks(group, 1000) != ranks * (ranks - 1) / 2) return 4;
    group.free(x);
    return 0;
  });
  expect_all_end_well(children);
}

}  // namespace
}  // namespace lockstep::shm
