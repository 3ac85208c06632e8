#include <gtest/gtest.h>

#include <algorithm>

#include "base/clock.h"
#include "base/error.h"
#include "collectives/shm/backend/handles.h"
#include "collectives/shm/forked_ranks.h"

// Groups of processes that know each other's handles only: survivors of a killed rank, and processes that join them.
namespace lockstep::shm {
namespace {

using shm_engine::form_by_handles;
using shm_engine::new_handle;
using std::chrono::milliseconds;

constexpr milliseconds kLong = std::chrono::seconds(30);
constexpr milliseconds kShort{400};
constexpr double kAtMost_s = 1;

/// What a rank is told; empty if it has formed a group.
std::string told(const std::string& mine, const std::vector<std::string>& handles, int64_t uuid, milliseconds timeout) {
  try {
    form_by_handles(mine, handles, uuid, timeout);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

void expect_part(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in '" << text << "'";
}

int64_t sum_to(int ranks) { return int64_t{ranks} * (ranks - 1) / 2; }

std::vector<std::string> without(std::vector<std::string> handles, int rank) {
  handles.erase(handles.begin() + rank);
  return handles;
}

/// The ranks 0 to 2 train; `victim` is killed in the midst of it. The others form a smaller group, which the process 3
/// joins. Returns an exit code.
int live(Board& board, int rank, int victim, unsigned steps) {
  constexpr int kFirst = 3, kNewcomer = 3;
  int round = 0;
  const std::string mine = new_handle(rank);
  const auto all = board.all_gather(rank, round, mine);
  if (rank != kNewcomer) {
    Communicator group(form_by_handles(mine, without(all, kNewcomer), 1, kLong));
    if (group.rank() != rank || group.size() != kFirst) return 1;
    try {
      for (unsigned step = 0;; ++step) {
        if (rank == victim && step == steps) ::raise(SIGKILL);
        if (sum_of_ranks(group, 1 + 5000 * (step % 2)) != sum_to(kFirst)) return 2;
      }
    } catch (const Error& error) {
      if (std::string(error.what()).find("rank " + std::to_string(victim)) == std::string::npos) return 3;
    }
    const auto start = Clock::now();
    Communicator smaller(form_by_handles(mine, without(without(all, kNewcomer), victim), 2, kLong));
    if (smaller.size() != kFirst - 1 || smaller.rank() != rank - (rank > victim)) return 4;
    if (sum_of_ranks(smaller, 1000) != sum_to(kFirst - 1)) return 5;
    if (seconds_since(start) > kAtMost_s) return 6;
  }
  Communicator joined(form_by_handles(mine, without(all, victim), 3, kLong));
  return joined.size() == kFirst && sum_of_ranks(joined, 1000) == sum_to(kFirst) ? 0 : 7;
}

void kill_and_go_on(unsigned times) {
  for (unsigned seed = 0; seed < times && !::testing::Test::HasFailure(); ++seed) {
    const int victim = static_cast<int>(seed % 3);
    Board board(4);
    const auto children = fork_ranks(4, [&](int rank) { return live(board, rank, victim, seed % 17); });
    for (int rank = 0; rank < 4; ++rank)
      EXPECT_EQ(exit_code(children[static_cast<size_t>(rank)], std::chrono::seconds(60)),
                rank == victim ? 128 + SIGKILL : 0)
          << "rank " << rank << ", seed " << seed;
  }
}

TEST(Regroup, SurvivorsGoOnAndAnotherJoins) { kill_and_go_on(20); }
TEST(RegroupOften, SurvivorsGoOnAndAnotherJoins) { kill_and_go_on(200); }

TEST(Regroup, OneAlone) {
  const std::string mine = new_handle(5);
  Communicator group(form_by_handles(mine, {mine}, 1, kLong));
  EXPECT_EQ(sum_of_ranks(group, 10), 0);
}

TEST(Regroup, ANewGroupLeavesNothingOfTheOld) {
  const std::vector<std::string> handles{new_handle(0), new_handle(1)};
  int descriptors = 0, maps = 0;
  for (int uuid = 0; uuid < 5; ++uuid) {
    on_threads(2, [&](int rank) {
      auto set = std::make_shared<ProgressSet>();
      Communicator group(form_by_handles(handles[static_cast<size_t>(rank)], handles, uuid, kLong), set);
      EXPECT_EQ(sum_of_ranks(group, 10), 1);
    });
    if (uuid == 0) descriptors = open_descriptors(), maps = mappings();
    EXPECT_EQ(open_descriptors(), descriptors);
    EXPECT_EQ(mappings(), maps);
  }
}

TEST(Regroup, ARankThatDoesNotComeIsNamedOnAll) {
  const std::vector<std::string> handles{new_handle(0), new_handle(1), new_handle(2)};
  on_threads(3, [&](int rank) {
    if (rank == 1) return;
    const auto start = Clock::now();
    expect_part(told(handles[static_cast<size_t>(rank)], handles, 7, kShort),
                "reconfigure(uuid 7): after 0 s rank 1 of the new group has not called it");
    EXPECT_LT(seconds_since(start), 5);
  });
  // The rank whose handle sorts first serves the others' meeting.
  expect_part(told(handles[1], handles, 8, kShort), "rank 0 of the new group has not called it");
}

TEST(Regroup, OtherHandlesAreToldOnAll) {
  const std::vector<std::string> handles{new_handle(0), new_handle(1), new_handle(2)};
  const std::vector<std::string> swapped{handles[0], handles[2], handles[1]};
  on_threads(3, [&](int rank) {
    const std::string text = told(handles[static_cast<size_t>(rank)], rank == 2 ? swapped : handles, 9, kLong);
    expect_part(text, "reconfigure(uuid 9): rank 2 of the new group was given other handles");
  });
  // Nor do they agree who is first.
  const std::vector<std::string> reversed{handles[2], handles[1], handles[0]};
  on_threads(3, [&](int rank) {
    const auto start = Clock::now();
    const std::string text = told(handles[static_cast<size_t>(rank)], rank == 2 ? reversed : handles, 11, kLong);
    expect_part(text, "of the new group was given other handles than rank 0, or in another order");
    EXPECT_LT(seconds_since(start), 5);
  });
  const std::vector<std::string> two{handles[0], handles[1]};  // the third believes to be in
  on_threads(3, [&](int rank) {
    const std::string text = told(handles[static_cast<size_t>(rank)], rank == 2 ? handles : two, 10, kLong);
    if (rank == 2) return expect_part(text, "rank 0 of the new group was given other handles");
    EXPECT_EQ(text, "");
  });
}

TEST(Regroup, WrongListsAreRefusedAtOnce) {
  const std::string mine = new_handle(0), other = new_handle(1);
  expect_part(told(mine, {}, 1, kLong), "there are no handles");
  expect_part(told(mine, {mine, mine}, 1, kLong), "a handle is in the list twice");
  expect_part(told(mine, {other}, 1, kLong), "this process's own handle is not in the list");
  expect_part(told(mine, {mine, "gloo:1"}, 1, kLong), "'gloo:1' is not a handle of a lockstep group");
  expect_part(told(mine, {mine, other + "x"}, 1, kLong), "ranks are on several machines");
}

TEST(Regroup, HandlesSortByRank) {
  std::vector<std::string> handles{new_handle(10), new_handle(9), new_handle(100)};
  const auto expected = std::vector{handles[1], handles[0], handles[2]};
  std::sort(handles.begin(), handles.end());
  EXPECT_EQ(handles, expected);
}

}  // namespace
}  // namespace lockstep::shm
