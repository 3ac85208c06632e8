#include "collectives/shm/bootstrap.h"

#include <dirent.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <random>

#include "base/clock.h"
#include "base/environment.h"
#include "base/error.h"
#include "collectives/shm/board.h"
#include "collectives/shm/local_world.h"
#include "collectives/shm/reference.h"

// Groups formed the real way: descriptors over sockets, by threads and by forked processes, some of which are killed.
namespace lockstep::shm {
namespace {

constexpr BootstrapOptions kSmall{.timeout = std::chrono::seconds(20), .resident_bytes = size_t{16} << 20};

World join(Board& board, int rank, int ranks, int& round) {
  return bootstrap(
      rank, ranks, [&](const std::string& mine) { return board.all_gather(rank, round, mine); }, kSmall);
}

int open_descriptors() {
  int count = 0;
  DIR* folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

int64_t sum_of_ranks(Group& group, size_t count, std::chrono::milliseconds timeout = kTestTimeout) {
  std::vector<int64_t> x(count, group.rank());
  group.run({.kind = OperationKind::kAllReduce,
             .type = DataType::kInt64,
             .count = count,
             .input = x.data(),
             .output = x.data()},
            timeout);
  return x[count - 1];
}

class Bootstrapped : public ::testing::TestWithParam<int> {};

TEST_P(Bootstrapped, ThreadsFormGroupsAndLeaveNothingBehind) {
  const int ranks = GetParam(), before = open_descriptors();
  Board board(ranks);
  on_threads(ranks, [&](int rank) {
    int round = 0;
    auto set = std::make_shared<ProgressSet>();
    for (int i = 0; i < 3; ++i) {
      Group a(join(board, rank, ranks, round), set), b(join(board, rank, ranks, round), set);
      for (size_t count : {size_t{1}, size_t{1000}, size_t{200000}}) {
        ASSERT_EQ(sum_of_ranks(a, count), ranks * (ranks - 1) / 2);
        ASSERT_EQ(sum_of_ranks(b, count), ranks * (ranks - 1) / 2);
      }
    }
  });
  EXPECT_EQ(open_descriptors(), before);
}

TEST(Bootstrap, OneFailureFailsEveryRankWithItsText) {
  Board board(3);
  on_threads(3, [&](int rank) {
    int round = 0;
    BootstrapOptions options = kSmall;
    if (rank == 1) options.resident_bytes = size_t{1} << 60;  // more than there are addresses
    try {
      bootstrap(
          rank, 3, [&](const std::string& mine) { return board.all_gather(rank, round, mine); }, options);
      FAIL() << "rank " << rank << " formed a group";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("rank 1"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("are available"), std::string::npos) << error.what();
    }
  });
}

TEST(Bootstrap, AnotherMachineIsRefusedByName) {
  Board board(2);
  on_threads(2, [&](int rank) {
    int round = 0;
    const auto exchange = [&](const std::string& mine) {
      std::string text = mine;
      // Rank 1 says that it runs on another kernel.
      if (const auto at = text.find("\"boot_id\":\""); rank == 1 && at != std::string::npos) {
        text[at + 11] = text[at + 11] == '0' ? '1' : '0';
        const auto host = text.find("\"host\":\"");
        text.insert(host + 8, "far-");
      }
      return board.all_gather(rank, round, text);
    };
    try {
      bootstrap(rank, 2, exchange, kSmall);
      FAIL();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("rank 1 on host far-"), std::string::npos) << error.what();
    }
  });
}

/// Forks `ranks` children; body's result is the child's exit code.
std::vector<pid_t> fork_ranks(int ranks, const std::function<int(int)>& body) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      int code = 99;
      try {
        code = body(rank);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
      ::_exit(code);
    }
    children.push_back(child);
  }
  return children;
}

/// Exit code, or 128 + signal; -1 when it does not end within `limit` (then it is killed).
int exit_code(pid_t child, std::chrono::milliseconds limit) {
  const Deadline deadline(limit);
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    if (deadline.passed()) {
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      return -1;
    }
    ::usleep(200);
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST_P(Bootstrapped, ProcessesReduceBroadcastAndLeave) {
  const int ranks = GetParam();
  Board board(ranks);
  const auto children = fork_ranks(ranks, [&](int rank) {
    int round = 0;
    const int before = open_descriptors();
    {
      Group group(join(board, rank, ranks, round));
      for (size_t count : {size_t{1}, size_t{6}, size_t{512}, size_t{100000}, size_t{1000000}})
        if (sum_of_ranks(group, count) != ranks * (ranks - 1) / 2) return 1;
      // Resident memory of every rank is written by all of them.
      const size_t count = 300000;
      auto* x = reinterpret_cast<float*>(group.allocate(count * 4));
      for (int i = 0; i < 5; ++i) {
        std::fill(x, x + count, static_cast<float>(rank + i));
        group.run({.kind = OperationKind::kAllReduce,
                   .type = DataType::kFloat32,
                   .op = ReduceOp::kSum,
                   .count = count,
                   .input = x,
                   .output = x},
                  kTestTimeout);
        for (size_t k = 0; k < count; ++k)
          if (x[k] != static_cast<float>(ranks * (ranks - 1) / 2 + ranks * i)) return 2;
      }
      group.run({.kind = OperationKind::kBarrier}, kTestTimeout);
    }
    return open_descriptors() == before ? 0 : 3;
  });
  for (pid_t child : children) EXPECT_EQ(exit_code(child, std::chrono::seconds(60)), 0);
}

INSTANTIATE_TEST_SUITE_P(Ranks, Bootstrapped, ::testing::Values(1, 2, 3, 8));

TEST(Fork, AChildOfARankIsHarmless) {
  Board board(2);
  const auto children = fork_ranks(2, [&](int rank) {
    int round = 0;
    Group group(join(board, rank, 2, round));
    sum_of_ranks(group, 1000);
    const auto grandchildren = fork_ranks(1, [&](int) {
      try {
        sum_of_ranks(group, 1);
        return 1;
      } catch (const Error&) {
      }
      group.~Group();  // as exit() would, were it a global
      return 0;
    });
    const int code = exit_code(grandchildren[0], std::chrono::seconds(10));
    sum_of_ranks(group, 1000);
    return code;
  });
  for (pid_t child : children) EXPECT_EQ(exit_code(child, std::chrono::seconds(60)), 0);
}

/// Random operations until the group ends. 0 when the error names `victim`; the time of its end is left in `ended`.
int work_until_the_end(Group& group, unsigned seed, int victim, std::atomic<int64_t>& ended) {
  std::mt19937 random(seed);  // the same on every rank
  std::vector<float> x(1 << 18), y(8 << 18);
  auto* resident = group.allocate(1 << 20);
  for (int i = 0;; ++i) {
    Request request{
        .type = DataType::kFloat32, .count = size_t{1} << random() % 18, .input = x.data(), .output = x.data()};
    constexpr OperationKind kKinds[] = {OperationKind::kAllReduce, OperationKind::kAllReduce, OperationKind::kBroadcast,
                                        OperationKind::kBarrier,   OperationKind::kAllGather, OperationKind::kReduce};
    request.kind = kKinds[random() % 6];
    request.root = static_cast<int>(random() % static_cast<unsigned>(group.size()));
    if (request.kind == OperationKind::kAllReduce && random() % 2) request.input = request.output = resident;
    if (request.kind == OperationKind::kAllGather) request.count >>= 2, request.output = y.data();
    try {
      group.run(std::move(request), kTestTimeout);
    } catch (const Error& error) {
      ended.store(Clock::now().time_since_epoch().count());
      const std::string text = error.what();
      if (text.find("rank " + std::to_string(victim) + " (pid ") == 0 &&
          text.find(") ended while rank ") != std::string::npos)
        return 0;
      std::fprintf(stderr, "rank %d: %s\n", group.rank(), text.c_str());
      return 4;
    }
  }
}

void kill_one(int ranks, unsigned seed, double& slowest, bool with_child) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const int victim = static_cast<int>(random() % static_cast<unsigned>(ranks));
  Board board(ranks);
  struct Shared {
    std::atomic<int> ready;
    std::atomic<int64_t> ended[8];
  };
  void* memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* shared = new (memory) Shared{};
  const auto children = fork_ranks(ranks, [&](int rank) {
    int round = 0;
    const int before = open_descriptors();
    int code;
    {
      Group group(join(board, rank, ranks, round));
      if (with_child && rank == victim && ::fork() == 0) {
        ::usleep(2'000'000);  // holds the victim's sockets open
        ::_exit(0);
      }
      shared->ready.fetch_add(1);
      code = work_until_the_end(group, seed, victim, shared->ended[rank]);
    }
    return code != 0 ? code : open_descriptors() == before ? 0 : 5;
  });
  while (shared->ready.load() < ranks) ::usleep(100);
  ::usleep(static_cast<useconds_t>(random() % 20000));
  ::kill(children[static_cast<size_t>(victim)], SIGKILL);
  const int64_t killed = Clock::now().time_since_epoch().count();
  for (int r = 0; r < ranks; ++r)
    EXPECT_EQ(exit_code(children[static_cast<size_t>(r)], std::chrono::seconds(5)), r == victim ? 128 + SIGKILL : 0);
  for (int r = 0; r < ranks; ++r)
    if (r != victim) slowest = std::max(slowest, static_cast<double>(shared->ended[r].load() - killed) * 1e-9);
  ::munmap(memory, sizeof(Shared));
}

TEST(Kill, SurvivorsEndSoonAndNameTheRightRank) {
  double slowest = 0;
  // 60 with every change, 400 in `make test-nightly`.
  const unsigned kills = Environment::from_process().lockstep_nightly ? 400 : 60;
  for (unsigned seed = 1; seed <= kills && !HasFailure(); ++seed)
    kill_one(2 + static_cast<int>(seed % 3), seed, slowest, false);
  EXPECT_LT(slowest, 1);
  std::printf("the slowest survivor knew after %.1f ms\n", slowest * 1e3);
}

TEST(Kill, IsNoticedThoughAChildHoldsTheSockets) {
  double slowest = 0;
  for (unsigned seed = 1; seed <= 5 && !HasFailure(); ++seed) kill_one(3, seed, slowest, true);
  EXPECT_LT(slowest, 1);
}

}  // namespace
}  // namespace lockstep::shm
