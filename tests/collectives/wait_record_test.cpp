#include "collectives/wait_record.h"

#include <gtest/gtest.h>

#include "collectives/message_counts.h"

namespace lockstep::wait_record_test {
namespace {

const std::vector<uint64_t> kBits{1, 2, 4};

WaitRecord waiting(uint64_t group, uint64_t collective, std::map<uint64_t, uint64_t> called) {
  WaitRecord record{.serial = 1, .place = "in a call", .group = group, .number = collective, .needs = ~uint64_t{0}};
  record.caller.scope = "model";
  record.called = std::move(called);
  return record;
}

/// For the message with that number, of group 1.
WaitRecord waiting_for(const WaitRecord::Message& message, uint64_t number, uint64_t peer) {
  WaitRecord record{
      .serial = 1, .place = "in a message", .group = 1, .number = number, .needs = peer, .message = message};
  record.called = {{1, 0}, {2, 0}};
  return record;
}

TEST(WaitRecords, NeverGoOnOnlyInACycle) {
  // Ranks 0 and 1 wait for each other; rank 2 waits for rank 0.
  WaitRecords records{waiting(1, 5, {{1, 5}, {2, 3}}), waiting(2, 4, {{1, 4}, {2, 4}}), waiting(1, 5, {{1, 5}})};
  EXPECT_EQ(ranks_that_never_go_on(records, kBits), std::vector<bool>({true, true, true}));
  records[1].reset();  // it computes
  EXPECT_EQ(ranks_that_never_go_on(records, kBits), std::vector<bool>(3, false));
  // All have called what each waits for, as when a rank is stopped in the middle of it.
  records = {waiting(1, 5, {{1, 5}}), waiting(1, 5, {{1, 5}}), waiting(1, 6, {{1, 6}})};
  EXPECT_EQ(ranks_that_never_go_on(records, kBits), std::vector<bool>(3, false));
}

TEST(WaitRecords, ThatNeedSomeRanksNeverGoOnIfNoneOfThemDoes) {
  // Rank 0 waits for rank 1 or 2, neither of which has called; both wait for rank 0 elsewhere.
  WaitRecords records{waiting(1, 5, {{1, 5}, {2, 3}}), waiting(2, 4, {{1, 4}, {2, 4}}),
                      waiting(2, 4, {{1, 4}, {2, 4}})};
  records[0]->needs_some = true;
  EXPECT_EQ(ranks_that_never_go_on(records, kBits), std::vector<bool>({true, true, true}));
  records[2]->called[1] = 5;
  EXPECT_EQ(ranks_that_never_go_on(records, kBits), std::vector<bool>({true, true, true})) << "it has called already";
  records[2].reset();  // it computes, and may call next
  EXPECT_EQ(ranks_that_never_go_on(records, kBits), std::vector<bool>(3, false));
  records[0]->needs_some = false;
  EXPECT_EQ(ranks_that_never_go_on(records, kBits), std::vector<bool>({true, true, false}));
}

TEST(WaitRecords, NeverGoOnWhereOneHasLeftTheCalls) {
  WaitRecords records{waiting(1, 5, {{1, 5}}), std::nullopt, waiting(1, 5, {{1, 5}})};
  Departures gone;
  gone["model"] = {std::nullopt, waiting(0, 0, {{1, 4}}), std::nullopt};
  EXPECT_EQ(ranks_that_never_go_on(records, kBits, gone), std::vector<bool>({true, false, true}));
  gone["model"][1]->called[1] = 5;
  EXPECT_EQ(ranks_that_never_go_on(records, kBits, gone), std::vector<bool>(3, false));
  gone["model"][1]->called[1] = 4;
  records[0]->caller.scope = records[2]->caller.scope = "";  // the program may call the group without the model
  EXPECT_EQ(ranks_that_never_go_on(records, kBits, gone), std::vector<bool>(3, false));
}

TEST(WaitRecords, OfMessagesCompareNumbers) {
  const WaitRecord::Message receive{.is_send = false, .needs_receive = false, .tag = 7};
  WaitRecords records{waiting_for(receive, 3, kBits[1]), waiting(2, 1, {{1, 0}, {2, 1}})};
  const std::vector<bool> both(2, true), none(2, false);
  const WaitRecord::Messages sends{.group = 1, .peer = kBits[0], .is_send = true, .tag = 7};
  EXPECT_EQ(ranks_that_never_go_on(records, kBits), both) << "nothing was sent";
  records[1]->messages[sends] = {.calls = 2, .done = 2};
  EXPECT_EQ(ranks_that_never_go_on(records, kBits), both);
  records[1]->messages[sends].calls = 3;
  EXPECT_EQ(ranks_that_never_go_on(records, kBits), none) << "it is on its way";
  records[1]->messages[sends].calls = 2;
  records[1]->called.erase(1);
  EXPECT_EQ(ranks_that_never_go_on(records, kBits), none) << "the group is not known there";
  records[1]->called[1] = 0;
  WaitRecord::Messages others = sends;
  others.tag = MessageCounts::kNoTag;
  records[1]->messages[others] = {};
  EXPECT_EQ(ranks_that_never_go_on(records, kBits), both) << "those of this tag are counted";
  records[1]->messages.erase(sends);
  EXPECT_EQ(ranks_that_never_go_on(records, kBits), none) << "there may be some among the others";
}

TEST(WaitRecords, OfSendsKnowWhatMakesRoom) {
  WaitRecords records{waiting_for({.is_send = true, .needs_receive = false, .tag = 7}, 3, kBits[1]),
                      waiting(2, 1, {{1, 0}, {2, 1}})};
  const std::vector<bool> both(2, true), none(2, false);
  const WaitRecord::Messages other{.group = 1, .peer = kBits[0], .is_send = false, .tag = 8};
  EXPECT_EQ(ranks_that_never_go_on(records, kBits), both);
  records[1]->messages[other] = {.calls = 2, .done = 1};
  EXPECT_EQ(ranks_that_never_go_on(records, kBits), none)
      << "a receive of another message may take this one out of the way";
  records[0]->message->needs_receive = true;
  EXPECT_EQ(ranks_that_never_go_on(records, kBits), both);
}

TEST(WaitRecords, ArePackedAndUnpacked) {
  WaitRecord record = waiting_for({.is_send = true, .needs_receive = true, .tag = 5}, 8, 2);
  record.place = "in step() after 3 backwards\nof `a b`";
  record.caller = {.of = "a model", .advice = "do it all alike", .scope = "x/1"};
  record.messages[{.group = 1, .peer = 2, .is_send = true, .tag = 5}] = {.calls = 9, .done = 8};
  const WaitRecord same = WaitRecord::unpacked(record.packed());
  EXPECT_EQ(same.packed(), record.packed());
  EXPECT_EQ(same.place, record.place);
  EXPECT_EQ(same.caller.advice, record.caller.advice);
  EXPECT_EQ(same.message, record.message);
  EXPECT_EQ(same.called, record.called);
  EXPECT_EQ(same.messages.size(), 1u);
  (void)WaitRecord::unpacked("9999999999999 x");
  (void)WaitRecord::unpacked("");
}

TEST(WaitRecords, ANumberForEachMessageOfATag) {
  MessageCounts counts;
  EXPECT_EQ(counts.count(2, true, 1, 0).number, 1u);
  EXPECT_EQ(counts.count(2, true, 1, 4).number, 1u);
  EXPECT_EQ(counts.count(2, true, 1, 0).number, 2u);
  EXPECT_EQ(counts.count(2, false, 1, 0).number, 1u);
  for (int tag = 0; tag < 2 * MessageCounts::kTags; ++tag) (void)counts.count(2, true, 0, tag);
  EXPECT_EQ(counts.count(2, true, 0, 2 * MessageCounts::kTags - 1).number, 0u) << "not counted";
  EXPECT_EQ(counts.count(2, true, 0, 0).number, 2u);
  const MessageCounts::Message one = counts.count(2, false, 1, 0);
  one.note_done();
  bool has_others = false;
  counts.visit(2, [&](const MessageCounts::Counted& seen) {
    has_others = has_others || (seen.peer == 0 && seen.is_send && seen.tag == MessageCounts::kNoTag);
    if (seen.peer != 1 || seen.is_send) return;
    EXPECT_EQ(seen.calls, 2u);
    EXPECT_EQ(seen.done, 1u);
  });
  EXPECT_TRUE(has_others);
}

TEST(WaitRecords, PlacesOfSeveralRanks) {
  const WaitRecord gone{.place = "has destroyed its model"}, elsewhere{.place = "in step() of its model"};
  EXPECT_EQ(places_of({gone, elsewhere}, {true, true}),
            "rank 0 has destroyed its model; rank 1 in step() of its model");
  EXPECT_EQ(places_of({gone, std::nullopt, gone}, {true, false, true}), "ranks 0, 2 have destroyed their model");
}

}  // namespace
}  // namespace lockstep::wait_record_test
