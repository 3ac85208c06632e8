#include "collectives/shm/segment/bootstrap.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <random>

#include "base/clock.h"
#include "base/environment.h"
#include "base/error.h"
#include "collectives/shm/forked_ranks.h"
#include "collectives/shm/reference.h"

// Groups formed the real way: descriptors over sockets, by threads and by forked processes, some of which are killed.
namespace lockstep::shm {
namespace {

class Bootstrapped : public ::testing::TestWithParam<int> {};

TEST_P(Bootstrapped, ThreadsFormGroupsAndLeaveNothingBehind) {
  const int ranks = GetParam(), before = open_descriptors();
  Board board(ranks);
  on_threads(ranks, [&](int rank) {
    int round = 0;
    auto set = std::make_shared<ProgressSet>();
    for (int i = 0; i < 3; ++i) {
      Communicator a(join(board, rank, ranks, round), set), b(join(board, rank, ranks, round), set);
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
      EXPECT_NE(std::string(error.what()).find("of address space could not be mapped"), std::string::npos)
          << error.what();
    }
  });
}

TEST(Bootstrap, OtherMachinesAreRefusedByName) {
  Board board(5);
  const char* const kHosts[] = {"a", "b", "a", "c", "b"};
  on_threads(5, [&](int rank) {
    int round = 0;
    const std::string host = kHosts[rank];
    const auto exchange = [&](const std::string& mine) {
      std::string text = mine;
      // Each machine has a different kernel.
      for (const auto& [field, value] : {std::pair("boot_id", "boot of " + host), std::pair("host", host)})
        if (const auto at = text.find("\"" + std::string(field) + "\":\""); at != std::string::npos) {
          const size_t begin = at + std::strlen(field) + 4;
          text.replace(begin, text.find('"', begin) - begin, value);
        }
      return board.all_gather(rank, round, text);
    };
    try {
      bootstrap(rank, 5, exchange, kSmall);
      FAIL();
    } catch (const Error& error) {
      EXPECT_NE(
          std::string(error.what()).find("run on 3: ranks 0, 2 on host a; ranks 1, 4 on host b; rank 3 on host c"),
          std::string::npos)
          << error.what();
    }
  });
}

/// ThreadSanitizer, for one, leaves a process fewer addresses than the system does.
bool has_addresses(size_t bytes) {
  void* const memory = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory != MAP_FAILED && ::munmap(memory, bytes) == 0;
}

TEST(Bootstrap, ManyGroupsFitIntoTheAddressesOfAnyMachine) {
  if (!has_addresses(size_t{64} << 40)) GTEST_SKIP() << "SKIPPED BECAUSE this process cannot map 64 TiB of addresses";
  // Out of 128 TiB of addresses: each further group gets less, and all remain usable.
  for (size_t machine_bytes : {size_t{2} << 40, size_t{32} << 40, size_t{500} << 40}) {
    Board board(1);
    int round = 0;
    std::vector<std::unique_ptr<Communicator>> groups;
    size_t first = 0, last = 0;
    for (int i = 0; i < 30; ++i) {
      groups.push_back(std::make_unique<Communicator>(
          join(board, 0, 1, round, {.resident_bytes = 0, .machine_bytes = machine_bytes})));
      last = groups.back()->world().geometry().resident_bytes;
      if (i == 0) first = last;
      groups.back()->free(groups.back()->allocate(size_t{1} << 20));
    }
    EXPECT_LE(first, std::min(machine_bytes, size_t{3} << 40));
    EXPECT_GT(first, std::min(machine_bytes, size_t{3} << 40) - (size_t{1} << 20));
    EXPECT_GT(last, size_t{500} << 30);
    EXPECT_LT(mapped_segment_bytes(), size_t{96} << 40);
    try {
      groups.back()->allocate(last + (1 << 20));
      FAIL() << "allocated more than was reserved";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("has address space for only"), std::string::npos) << error.what();
    }
  }
}

TEST_P(Bootstrapped, ProcessesReduceBroadcastAndLeave) {
  const int ranks = GetParam();
  Board board(ranks);
  const auto children = fork_ranks(ranks, [&](int rank) {
    int round = 0;
    const int before = open_descriptors();
    {
      Communicator group(join(board, rank, ranks, round));
      for (size_t count : {size_t{1}, size_t{6}, size_t{512}, size_t{100000}, size_t{1000000}})
        if (sum_of_ranks(group, count) != ranks * (ranks - 1) / 2) return 1;
      // All ranks write to every rank's resident memory.
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
    return open_descriptors() != before ? 3 : mappings() != 0 ? 4 : 0;
  });
  for (pid_t child : children) EXPECT_EQ(exit_code(child, std::chrono::seconds(60)), 0);
}

TEST(Bootstrap, SixtyFourProcessesOfALargeMachineFormGroupsWithFewDescriptors) {
  if (!has_addresses(size_t{12} << 40)) GTEST_SKIP() << "SKIPPED BECAUSE this process cannot map 12 TiB of addresses";
  constexpr int kRanks = kMaxRanks, kGroups = 3;
  Board board(kRanks);
  const auto children = fork_ranks(kRanks, [&](int rank) {
    // One process descriptor for each peer, and a socket while a group is formed; three groups that each had a socket
    // and a process descriptor for each peer would need 380.
    rlimit limit{.rlim_cur = 200, .rlim_max = 200};
    ::setrlimit(RLIMIT_NOFILE, &limit);
    int round = 0;
    const int before = open_descriptors();
    {
      std::vector<std::unique_ptr<Communicator>> groups;
      for (int i = 0; i < kGroups; ++i)
        groups.push_back(std::make_unique<Communicator>(
            join(board, rank, kRanks, round, {.timeout = std::chrono::seconds(60), .machine_bytes = size_t{2} << 40})));
      for (const auto& group : groups)
        for (size_t count : {size_t{1}, size_t{100'000}})
          if (sum_of_ranks(*group, count) != kRanks * (kRanks - 1) / 2) return 1;
      if (mappings() != kGroups * kRanks) return 2;
      if (open_descriptors() > before + kRanks - 1 + kGroups) return 3;
    }
    return open_descriptors() != before ? 4 : mappings() != 0 ? 5 : 0;
  });
  for (pid_t child : children) EXPECT_EQ(exit_code(child, std::chrono::seconds(80)), 0);
}

INSTANTIATE_TEST_SUITE_P(Ranks, Bootstrapped, ::testing::Values(1, 2, 3, 8));

/// Starts random operations of every kind and messages around the ring, a few at a time, and waits for them.
class RandomWork {
 public:
  /// `seed`: the same on every rank.
  RandomWork(Communicator& group, unsigned seed)
      : group_(group), random_(seed), resident_(group.allocate(kMost * ranks())) {}

  /// Throws Error when the group has ended.
  void round() {
    if (below(4) == 0) return group_.run(any(), kTestTimeout);
    std::vector<WorkPtr> works;
    for (unsigned i = 0, count = 1 + below(6); i < count; ++i) {
      if (below(3) == 0)
        exchange(works);
      else
        works.push_back(group_.start(any()));
    }
    if (below(2) == 0) std::reverse(works.begin(), works.end());
    for (const auto& work : works) group_.wait(*work, kTestTimeout);
  }

 private:
  static constexpr size_t kMost = size_t{1} << 17;  // bytes of a block

  size_t ranks() const { return static_cast<size_t>(group_.size()); }
  unsigned below(unsigned limit) { return static_cast<unsigned>(random_() % limit); }

  Request any() {
    Request request{.type = DataType::kFloat32, .count = (size_t{1} << below(18)) / sizeof(float)};
    request.kind = static_cast<OperationKind>(1 + below(10));
    request.root = static_cast<int>(below(static_cast<unsigned>(group_.size())));
    request.input = sent_.data();
    request.output = received_.data();
    if (request.kind == OperationKind::kAllReduce && below(2)) request.input = request.output = resident_;
    if (request.kind == OperationKind::kBroadcast) request.input = request.output;
    if (request.kind == OperationKind::kAllToAllUneven) {
      std::vector<size_t> table(ranks() * ranks());  // [from, to]
      for (size_t& count : table) count = below(3) * request.count / 2;
      for (size_t r = 0; r < ranks(); ++r) {
        request.make_pieces().send_counts.push_back(table[me() * ranks() + r]);
        request.make_pieces().receive_counts.push_back(table[r * ranks() + me()]);
      }
    }
    return request;
  }

  void exchange(std::vector<WorkPtr>& works) {
    const size_t bytes = size_t{1} << below(18);
    const int n = group_.size(), tag = static_cast<int>(below(3));
    works.push_back(group_.send(sent_.data(), bytes, (group_.rank() + 1) % n, tag));
    works.push_back(group_.receive(message_.data(), bytes, (group_.rank() + n - 1) % n, tag));
  }

  size_t me() const { return static_cast<size_t>(group_.rank()); }

  Communicator& group_;
  std::mt19937 random_;
  std::byte* resident_;
  std::vector<std::byte> sent_ = std::vector<std::byte>(kMost * ranks());
  std::vector<std::byte> received_ = std::vector<std::byte>(kMost * ranks());
  std::vector<std::byte> message_ = std::vector<std::byte>(kMost);
};

/// Random work until the group ends. Returns 0 if the error names `victim`; stores the time of the end in `ended`.
int work_until_the_end(Communicator& group, unsigned seed, int victim, std::atomic<int64_t>& ended) {
  RandomWork work(group, seed);
  try {
    for (;;) work.round();
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
      Communicator group(join(board, rank, ranks, round));
      if (with_child && rank == victim && ::fork() == 0) {
        ::usleep(2'000'000);  // holds the victim's sockets open
        ::_exit(0);
      }
      shared->ready.fetch_add(1);
      code = work_until_the_end(group, seed, victim, shared->ended[rank]);
    }
    return code != 0 ? code : open_descriptors() != before ? 5 : mappings() != 0 ? 6 : 0;
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
  // 200 with every change, 400 in `make test-nightly`.
  const unsigned kills = Environment::from_process().lockstep_nightly ? 400 : 200;
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
