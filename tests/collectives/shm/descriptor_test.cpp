#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "base/error.h"
#include "collectives/shm/forked_ranks.h"

// Groups formed where descriptors are scarce: they form, or every rank fails soon and with the cause.
namespace lockstep::shm {
namespace {

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// The exit code of a rank that tries to form a group. 0: the group works; 10: refused, with a text that says so.
int try_to_form(Board& board, int rank, int ranks, int poor, const std::function<void()>& after_the_cards) {
  int round = 0;
  const Deadline soon(std::chrono::seconds(5));
  try {
    Communicator group(bootstrap(
        rank, ranks,
        [&](const std::string& mine) {
          auto all = board.all_gather(rank, round, mine);
          if (round == 1) after_the_cards();
          return all;
        },
        kSmall));
    return sum_of_ranks(group, 1000) == ranks * (ranks - 1) / 2 && !soon.passed() ? 0 : 1;
  } catch (const Error& error) {
    const std::string text = error.what();
    const bool told = has(text, "(ulimit -n)") && has(text, "Allow at least ");
    const bool named = rank == poor || has(text, "rank " + std::to_string(poor));
    if (told && named && !soon.passed()) return 10;
    std::fprintf(stderr, "rank %d after %s: %s\n", rank, soon.passed() ? "too long" : "a moment", text.c_str());
    return 2;
  }
}

class Descriptors : public ::testing::TestWithParam<int> {
 protected:
  /// With one rank that may open only so many more descriptors: all ranks form the group, or all say why not.
  bool stands(int poor, int more, bool between) {
    const int ranks = GetParam();
    Board board(ranks);
    const auto children = fork_ranks(ranks, [&](int rank) {
      const auto become_poor = [&] {
        if (rank != poor) return;
        const int first = ::open("/", O_PATH | O_CLOEXEC);
        for (int fd = first; fd < 1024; ++fd) ::close(fd);
        const rlimit limit{.rlim_cur = static_cast<rlim_t>(first + more), .rlim_max = 1024};
        ::setrlimit(RLIMIT_NOFILE, &limit);
      };
      // What it needs was there when it checked.
      const auto become_poor_later = [&] {
        if (rank != poor) return;
        std::vector<int> taken;
        for (int fd; (fd = ::open("/", O_PATH | O_CLOEXEC)) >= 0 && fd < 200;) taken.push_back(fd);
        const rlimit limit{.rlim_cur = static_cast<rlim_t>(taken.back() + 1), .rlim_max = 1024};
        ::setrlimit(RLIMIT_NOFILE, &limit);
        for (int i = 0; i < more; ++i, taken.pop_back()) ::close(taken.back());
      };
      if (!between) become_poor();
      return try_to_form(
          board, rank, ranks, poor, between ? std::function<void()>(become_poor_later) : [] {});
    });
    std::vector<int> codes;
    for (pid_t child : children) codes.push_back(exit_code(child, std::chrono::seconds(10)));
    for (int code : codes) EXPECT_EQ(code, codes[0]) << "with " << more << " descriptors more for rank " << poor;
    EXPECT_TRUE(codes[0] == 0 || codes[0] == 10) << "with " << more << " descriptors more for rank " << poor;
    return codes[0] == 0;
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Descriptors, ::testing::Values(2, 3));

// A rank that could not accept checked its deadline only when the queue was empty: it spun forever.
TEST_P(Descriptors, TooFewAreToldAtOnceOnEveryRank) {
  for (int poor = 0; poor < GetParam(); ++poor) {
    const auto needed = static_cast<int>(descriptors_to_form(poor, GetParam()));
    for (int more = 0; more <= needed && !HasFailure(); ++more)
      EXPECT_EQ(stands(poor, more, /*between=*/false), more == needed) << more << " of " << needed;
  }
}

// Another thread may take the last descriptors after this rank has checked.
TEST_P(Descriptors, ThatGoWhileTheGroupFormsEndItAtOnceOnEveryRank) {
  for (int poor = 0; poor < GetParam(); ++poor) {
    EXPECT_FALSE(stands(poor, 0, /*between=*/true));
    for (int more = 1; more <= 6 && !HasFailure(); ++more) stands(poor, more, /*between=*/true);
    EXPECT_TRUE(stands(poor, 8, /*between=*/true));
  }
}

}  // namespace
}  // namespace lockstep::shm
