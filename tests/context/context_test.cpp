#include <lockstep/context.h>

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>

#include <chrono>
#include <thread>

#include "base/clock.h"
#include "base/usable_cores.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

using namespace testing;  // NOLINT

class Ranks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSize, Ranks, ::testing::Values(1, 2, 3));

TEST_P(Ranks, KnowTheirPlaceAndShareTheCores) {
  run_ranks(GetParam(), [](Context& context) {
    EXPECT_EQ(context.world_size(), context.local_world_size());
    EXPECT_EQ(context.rank(), context.local_rank());
    EXPECT_EQ(context.is_main(), context.rank() == 0);
    const at::Tensor ranks = context.group().all_gather(at::scalar_tensor(context.rank(), at::kLong));
    EXPECT_TRUE(at::equal(ranks, at::arange(context.world_size(), at::kLong)));
    const auto cpus = allowed_cpus();
    const std::vector<std::vector<int>> masks(static_cast<size_t>(context.world_size()), cpus);
    EXPECT_EQ(context.threads(), threads_per_rank(masks, context.rank(), cgroup_cpu_quota()));
    EXPECT_EQ(at::get_num_threads(), context.threads());
  });
}

TEST_P(Ranks, SeedIsTheContextsPlusTheRank) {
  run_ranks(GetParam(),
            [](Context& context) {
              const at::Tensor drawn = at::rand({4});
              at::manual_seed(7 + static_cast<uint64_t>(context.rank()));
              EXPECT_TRUE(at::equal(drawn, at::rand({4})));
              EXPECT_EQ(context.seed(), 7u);
            },
            std::chrono::seconds(60), {.seed = 7, .announce = false});
}

TEST_P(Ranks, LeaveAtTheSameCallWhenOneIsAsked) {
  run_ranks(GetParam(), [](Context& context) {
    EXPECT_FALSE(context.stop_requested());
    int64_t call = 1;
    for (bool asked = false; !asked; ++call) {
      // As a scheduler would, to one of them alone.
      if (call == 20 && context.rank() == context.world_size() - 1) ::raise(SIGUSR1);
      ASSERT_LT(call, 1000);
      asked = context.stop_requested();
    }
    const at::Tensor calls = context.group().all_gather(at::scalar_tensor(call, at::kLong));
    EXPECT_TRUE(at::equal(calls, at::full_like(calls, call))) << calls;
    EXPECT_GE(call, 20);
    EXPECT_TRUE(context.stop_requested()) << "and it stays so";
  });
}

TEST(StopRequests, AreNotForChildrenThatTheRankForked) {
  run_ranks(1, [](Context& context) {
    EXPECT_FALSE(context.stop_requested());
    const pid_t child = ::fork();
    if (child == 0) {
      ::raise(SIGTERM);
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM) << status;
    EXPECT_FALSE(context.stop_requested());
  });
}

TEST(StopRequests, DoNotReplaceHandlersOfTheProgram) {
  run_ranks(1, [](Context& context) {
    static volatile sig_atomic_t mine = 0;
    ::signal(SIGTERM, [](int) { mine = 1; });
    EXPECT_FALSE(context.stop_requested());
    ::raise(SIGTERM);
    EXPECT_EQ(mine, 1);
    EXPECT_FALSE(context.stop_requested());
  });
}

TEST(Threads, AreTheUsersWhereHeSaysSo) {
  ::setenv("OMP_NUM_THREADS", "3", 1);
  run_ranks(2, [](Context& context) { EXPECT_EQ(context.threads(), at::get_num_threads()); });
  ::unsetenv("OMP_NUM_THREADS");
}

/// What a Context of these options throws, where this process has none; "": nothing.
std::string said_of(const ContextOptions& options) {
  try {
    const Context context(options);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST_P(Ranks, RefuseOptionsThatMakeNoSense) {
  run_ranks(GetParam(), [](Context& context) {
    { const Context gone(std::move(context)); }
    EXPECT_EQ(said_of({.threads = -1, .announce = false}), "ContextOptions::threads is -1; it must be 0 or more");
    EXPECT_EQ(said_of({.threads = 4097, .announce = false}),
              "ContextOptions::threads is 4097; it is the number of threads that a rank computes with, at most 4096");
    for (const int ms : {0, -5})
      EXPECT_EQ(said_of({.collective_timeout = std::chrono::milliseconds(ms), .announce = false}),
                "ContextOptions::collective_timeout is " + std::to_string(ms) + " ms; it must be more than 0");
    // The environment's number of threads does not make a wrong one right.
    ::setenv("OMP_NUM_THREADS", "2", 1);
    EXPECT_NE(said_of({.threads = 4097, .announce = false}), "");
    ::unsetenv("OMP_NUM_THREADS");
    EXPECT_EQ(said_of({.threads = 2, .collective_timeout = std::chrono::milliseconds(20000), .announce = false}), "");
  });
}

TEST(Options, ThatDifferByRankAreAnErrorOnAllRanks) {
  for (const int ranks : {2, 3})
    for (const char* backend : {"shm", "gloo"})
      run_ranks(ranks, [&](Context& context) {
        const int rank = context.rank(), last = context.world_size() - 1;
        { const Context gone(std::move(context)); }
        EXPECT_EQ(said_of({.collective_timeout = std::chrono::seconds(rank == last ? 7 : 1800),
                           .backend = backend,
                           .announce = false}),
                  "ContextOptions::collective_timeout is 7000 ms on rank " + std::to_string(last) +
                      " and 1800000 ms on rank 0; set it alike on all ranks");
      });
}

TEST(Options, SharedMemoryOfSeveralMachinesIsRefusedAtOnce) {
  const auto start = Clock::now();
  run_ranks({3, "hierarchical", "aab"}, [&](Context& context) {
    { const Context gone(std::move(context)); }
    EXPECT_EQ(said_of({.backend = "shm", .announce = false}),
              "ContextOptions::backend is \"shm\", but the ranks are on 2 machines; leave it empty, or set it to "
              "\"gloo\" or \"hierarchical\"");
  });
  EXPECT_LT(seconds_since(start), 20);
}

void throw_out_of(Context context) {
  try {
    const Context moved(std::move(context));
    throw std::runtime_error("on purpose");
  } catch (const std::runtime_error&) {
  }
}

TEST(Leaving, WaitsForTheOthersButNotForEver) {
  run_ranks(2, [](Context& context) {
    // Rank 0 leaves at once; its exchange with the slower rank still succeeds because it waits in its destructor.
    at::Tensor tensor = at::ones({1 << 20});
    context.group().all_reduce(tensor);
    if (context.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    EXPECT_EQ(tensor[0].item<float>(), 2);
  });
}

TEST(Leaving, OnesThatStillNeedThisRankHearOfItAtOnce) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [](Context& context) {
      const Group everybody = context.group(), part = context.group().subgroup({0, 1}).value_or(everybody);
      context.group().barrier();
      const auto start = Clock::now();
      if (context.rank() == 1) {
        { const Context leaving(std::move(context)); }
        EXPECT_FALSE(part.is_open());
        EXPECT_GT(seconds_since(start), 4) << "it waits for the others, who might be slow to leave";
        return;
      }
      // Rank 1 need not be gone: its process waits in the destructor of its Context.
      for (const Group& group : {part, everybody}) {
        try {
          const at::Tensor tensor = at::ones({64});
          for (int turn = 0; turn < 2; ++turn) group.all_reduce(tensor);
          ADD_FAILURE() << "no rank 1 could take part";
        } catch (const Error& error) {
          EXPECT_NE(std::string(error.what()).find("rank 1 has already left the group"), std::string::npos)
              << error.what();
        }
      }
      EXPECT_LT(seconds_since(start), 2);
      // What would follow an error: it ends without a farewell.
      throw_out_of(std::move(context));
    });
  }
}

TEST(Leaving, OfOneThatNobodyNeedsHurtsNobody) {
  run_ranks(3, [](Context& context) {
    const auto start = Clock::now();
    const at::Tensor tensor = at::ones({1 << 20});
    context.group().all_reduce(tensor);
    if (context.rank() != 0) return;
    while (seconds_since(start) < 1) std::this_thread::sleep_for(std::chrono::milliseconds(10));  // say, it saves
    EXPECT_EQ(tensor[0].item<float>(), 3);
  });
}

TEST(Leaving, AfterAnExceptionIsImmediate) {
  const auto start = Clock::now();
  run_ranks(2, [](Context& context) {
    context.group().barrier();
    if (context.rank() == 0) return;  // leaves in good order, and waits for rank 1, bounded
    throw_out_of(std::move(context));
  });
  EXPECT_LT(seconds_since(start), 10);
}

}  // namespace
}  // namespace lockstep
