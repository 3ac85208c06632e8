#include "nn/exchange_records.h"

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace lockstep::exchange_records_test {
namespace {

std::string record(bool inside, uint64_t exchanges, uint64_t others, const std::string& place) {
  return ExchangeRecord{.look = {.waits = true, .inside = inside, .exchanges = exchanges, .others = others, .beats = 1},
                        .what = inside ? "batch norm `bn`" : "",
                        .place = place}
      .packed();
}

TEST(ExchangeRecord, KeepsWhatRanksTellEachOther) {
  const ExchangeRecord sent{.look = {.waits = true, .inside = true, .exchanges = 3, .others = 4, .beats = 5},
                            .what = "batch norm `a\nb`",
                            .place = "the forward"};
  const ExchangeRecord got = ExchangeRecord::unpacked(sent.packed());
  EXPECT_TRUE(got.look.inside);
  EXPECT_EQ(got.look.exchanges, 3u);
  EXPECT_EQ(got.look.others, 4u);
  EXPECT_EQ(got.look.beats, 5u);
  EXPECT_EQ(got.what, "batch norm `a b`");
  EXPECT_EQ(got.place, "the forward");
}

TEST(VerdictOn, RanksThatCanNeverMeetAreNamed) {
  const SaidByRanks apart = {record(true, 2, 5, "the forward of batch norm `bn`"), record(false, 1, 6, "all_reduce")};
  const std::string verdict = verdict_on(apart);
  EXPECT_NE(verdict.find("batch norm `bn` is synchronised over all ranks"), std::string::npos) << verdict;
  EXPECT_NE(verdict.find("rank 0 in the forward of batch norm `bn`, rank 1 in all_reduce"), std::string::npos)
      << verdict;
}

TEST(VerdictOn, NothingIsWrongWhileOneMayStillCome) {
  // The other has begun nothing that this one has not, or as many exchanges; or one of three is not heard of.
  EXPECT_EQ(verdict_on({record(true, 2, 5, "a"), record(false, 1, 5, "b")}), "");
  EXPECT_EQ(verdict_on({record(true, 2, 5, "a"), record(false, 2, 6, "b")}), "");
  EXPECT_EQ(verdict_on({record(true, 2, 5, "a"), record(false, 1, 6, "b"), std::nullopt}), "");
}

TEST(ExchangeBoard, RanksReadWhatTheOthersSay) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const ExchangeBoard first(store, 0, 2), second(store, 1, 2);
  EXPECT_EQ(first.tell(ExchangeBoard::kWaits, "here"), (SaidByRanks{"here", std::nullopt}));
  EXPECT_EQ(second.tell(ExchangeBoard::kWaits, "there"), (SaidByRanks{"here", "there"}));
  EXPECT_EQ(second.tell(ExchangeBoard::kWaits, ""), (SaidByRanks{"here", std::nullopt}));
  EXPECT_FALSE(first.is_decided_elsewhere());
  second.tell(ExchangeBoard::kDecided, "yes");
  EXPECT_TRUE(first.is_decided_elsewhere());
  EXPECT_FALSE(second.is_decided_elsewhere());
  const ExchangeBoard again(store, 1, 2);
  EXPECT_FALSE(first.is_decided_elsewhere());
}

}  // namespace
}  // namespace lockstep::exchange_records_test
