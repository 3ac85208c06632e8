#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collectives/shm/protocol/groups_note.h"

// What ranks tell each other about their waits in several groups, and which of them it shows to be stuck.

namespace lockstep::shm {
namespace {

using Kind = Waiting::Kind;

constexpr uint64_t kA = 11, kB = 12;
constexpr uint64_t kRank0 = 1, kRank1 = 2, kRank2 = 4;

/// In a collective.
GroupWait in(uint64_t group, uint64_t operation, uint64_t needs, std::vector<GroupCalls> calls) {
  return {.kind = Kind::kCollective, .group = group, .operation = operation, .needs = needs, .calls = std::move(calls)};
}
GroupWait receiving(uint64_t group, uint64_t of, std::vector<GroupCalls> calls, bool any = false) {
  return {.kind = Kind::kReceive, .group = group, .needs = of, .any_is_enough = any, .calls = std::move(calls)};
}
GroupWait sending(uint64_t group, uint64_t to, std::vector<GroupCalls> calls) {
  return {.kind = Kind::kSend, .group = group, .needs = to, .calls = std::move(calls)};
}

std::vector<bool> stuck(const GroupWaits& waits) { return ranks_stuck_in_groups(waits); }

TEST(GroupsNote, RanksInDifferentGroupsAreStuck) {
  EXPECT_EQ(stuck({in(kA, 3, kRank1, {{kA, 3}, {kB, 1}}), in(kB, 2, kRank0, {{kA, 2}, {kB, 2}})}),
            std::vector<bool>({true, true}));
  // One that waits for them is stuck, too.
  EXPECT_EQ(stuck({in(kA, 1, kRank1, {{kA, 1}, {kB, 0}}), in(kB, 1, kRank0, {{kA, 0}, {kB, 1}}),
                   in(kA, 1, kRank0 | kRank1, {{kA, 1}, {kB, 0}})}),
            std::vector<bool>({true, true, true}));
  EXPECT_EQ(stuck({receiving(kA, kRank1, {{kA}, {kB}}), in(kB, 1, kRank0, {{kA, 0}, {kB, 1}})}),
            std::vector<bool>({true, true}));
  EXPECT_EQ(stuck({sending(kA, kRank1, {{kA}, {kB}}), in(kB, 1, kRank0, {{kA, 0}, {kB, 1}})}),
            std::vector<bool>({true, true}));
  EXPECT_EQ(stuck({receiving(kA, kRank1 | kRank2, {{kA}, {kB}}, /*any=*/true), in(kB, 1, kRank0, {{kA}, {kB, 1}}),
                   in(kB, 1, kRank0, {{kA}, {kB, 1}})}),
            std::vector<bool>({true, true, true}));
}

TEST(GroupsNote, RanksThatMayGoOnAreNot) {
  const std::vector<bool> none{false, false};
  // The call has been made, and is under way.
  EXPECT_EQ(stuck({in(kA, 3, kRank1, {{kA, 3}, {kB, 1}}), in(kB, 2, kRank0, {{kA, 3}, {kB, 2}})}), none);
  EXPECT_EQ(stuck({in(kA, 3, kRank1, {{kA, 3}, {kB, 2}}), in(kB, 2, kRank0, {{kA, 2}, {kB, 2}})}), none);
  // It computes, or has left the group.
  EXPECT_EQ(stuck({in(kA, 3, kRank1, {{kA, 3}}), {}}), none);
  EXPECT_EQ(stuck({in(kA, 3, kRank1, {{kA, 3}, {kB, 1}}), in(kB, 2, kRank0, {{kB, 2}})}), none);
  // The message is on its way, or its receive has been called.
  EXPECT_EQ(
      stuck({receiving(kA, kRank1, {{kA}, {kB}}), in(kB, 1, kRank0, {{.group = kA, .sends_to = kRank0}, {kB, 1}})}),
      none);
  EXPECT_EQ(
      stuck({sending(kA, kRank1, {{kA}, {kB}}), in(kB, 1, kRank0, {{.group = kA, .receives_of = kRank0}, {kB, 1}})}),
      none);
  // One of several senders may send.
  EXPECT_EQ(stuck({receiving(kA, kRank1 | kRank2, {{kA}, {kB}}, /*any=*/true), in(kB, 1, kRank0, {{kA}, {kB, 1}}), {}}),
            std::vector<bool>({false, false, false}));
  // They wait in a row.
  EXPECT_EQ(stuck({{}, in(kA, 1, kRank0, {{kA, 1}, {kB, 0}}), in(kB, 1, kRank1, {{kB, 1}})}),
            std::vector<bool>({false, false, false}));
}

TEST(GroupsNote, IsReadAsItWasWritten) {
  const auto note = std::make_unique<GroupsNote>();
  EXPECT_EQ(note->read().wait.kind, Kind::kNothing);
  EXPECT_FALSE(note->finding());
  GroupWait wait = receiving(kB, ~uint64_t{0}, {}, /*any=*/true);
  for (uint64_t i = 0; i < GroupsNote::kGroups; ++i) wait.calls.push_back({i + 1, i, 1ull << i, ~i});
  wait.place = std::string(GroupsNote::kPlace, 'x');
  const uint64_t serial = note->say(wait);
  note->beat();
  const GroupsNote::Seen seen = note->read();
  EXPECT_EQ(seen.serial, serial);
  EXPECT_EQ(seen.beat, 1u);
  EXPECT_EQ(seen.wait.kind, Kind::kReceive);
  EXPECT_EQ(seen.wait.group, kB);
  EXPECT_EQ(seen.wait.needs, ~uint64_t{0});
  EXPECT_TRUE(seen.wait.any_is_enough);
  EXPECT_EQ(seen.wait.place, wait.place);
  ASSERT_EQ(seen.wait.calls.size(), GroupsNote::kGroups);
  EXPECT_EQ(seen.wait.calls[59].group, 60u);
  EXPECT_EQ(seen.wait.calls[59].started, 59u);
  EXPECT_EQ(seen.wait.calls[59].sends_to, 1ull << 59);
  EXPECT_EQ(seen.wait.calls[59].receives_of, ~59ull);
  note->withdraw();
  EXPECT_EQ(note->read().wait.kind, Kind::kNothing);
  EXPECT_GT(note->read().serial, serial);
  GroupsNote::Finding finding{.ranks = 5, .text = "why"};
  finding.serials[2] = serial;
  finding.groups[0] = kA;
  note->tell(finding);
  ASSERT_TRUE(note->finding());
  EXPECT_EQ(note->finding()->ranks, 5u);
  EXPECT_EQ(note->finding()->serials[2], serial);
  EXPECT_EQ(note->finding()->groups[0], kA);
  EXPECT_EQ(note->finding()->text, "why");
}

TEST(GroupsNote, IsNeverAMixtureOfTwo) {
  const auto note = std::make_unique<GroupsNote>();
  std::thread writer([&] {
    for (uint64_t i = 1; i <= 20'000; ++i) note->say(in(i, i, i, {{i, i, i, i}}));
  });
  for (uint64_t last = 0; last < 20'000;) {
    const GroupsNote::Seen seen = note->read();
    if (seen.wait.kind == Kind::kNothing) continue;
    last = seen.wait.group;
    ASSERT_EQ(seen.serial, 2 * last);
    ASSERT_EQ(seen.wait.operation, last);
    ASSERT_EQ(seen.wait.calls.at(0).receives_of, last);
  }
  writer.join();
}

TEST(GroupsNote, PlacesAreNamedOnceAndFitIntoAText) {
  GroupWaits waits(4);
  for (size_t rank = 0; rank < waits.size(); ++rank) waits[rank].place = rank < 3 ? "in a" : "in b";
  EXPECT_EQ(places_of(waits, {true, true, true, true}, 100), "ranks 0-2 in a; rank 3 in b");
  EXPECT_EQ(places_of(waits, {true, false, false, true}, 100), "rank 0 in a; rank 3 in b");
  EXPECT_EQ(places_of(waits, {true, true, true, true}, 25), "ranks 0-2 in a; and more");
}

}  // namespace
}  // namespace lockstep::shm
