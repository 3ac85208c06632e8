#include "data/epoch_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include <lockstep/error.h>

namespace lockstep::epoch_plan_test {
namespace {

using detail::EpochPlan;
using Indices = std::vector<int64_t>;

Indices of_rank(int rank, int world_size, int64_t start, const DataLoaderOptions& options = {.batch_size = 2}) {
  EpochPlan plan(10, Shard(rank, world_size), options, true);
  return plan.indices(/*epoch=*/0, start).at(0);
}

TEST(EpochPlan, RanksTakeEveryPlaceOnceFromTheStartOn) {
  for (const int64_t start : {0, 4}) {
    Indices all;
    for (int rank = 0; rank < 2; ++rank)
      for (const int64_t index : of_rank(rank, 2, start)) all.push_back(index);
    std::sort(all.begin(), all.end());
    Indices expected(static_cast<size_t>(10 - start));
    std::iota(expected.begin(), expected.end(), start);
    EXPECT_EQ(all, expected) << "from " << start;
  }
}

TEST(EpochPlan, CountsBatches) {
  const EpochPlan whole(10, Shard(0, 3), {.batch_size = 3}, true);
  EXPECT_EQ(whole.batch_size(), 3);
  EXPECT_EQ(whole.batches_in(7), 3);
  EXPECT_EQ(whole.samples_of_shards(0), (Indices{4}));
  EXPECT_EQ(whole.samples_of_shards(4), (Indices{2}));
  const EpochPlan dropping(10, Shard(0, 3), {.batch_size = 3, .drop_last = true}, true);
  EXPECT_EQ(dropping.batches_in(7), 2);
  const EpochPlan split(10, Shard(0, 3), {.batch_size = 6, .split_batches = true}, true);
  EXPECT_EQ(split.batch_size(), 2);
}

/// Orders that depend on how many were asked for before, as those of a generator of random numbers do.
class Rotating final : public Sampler {
 public:
  int64_t size() const override { return 4; }
  std::vector<int64_t> order(int) override {
    Indices indices{0, 1, 2, 3};
    std::rotate(indices.begin(), indices.begin() + drawn_++ % 4, indices.end());
    return indices;
  }
  c10::IValue state_dict() const override { return drawn_; }
  void load_state_dict(const c10::IValue& state) override { drawn_ = state.toInt(); }

 private:
  int64_t drawn_ = 0;
};

c10::impl::GenericDict empty_dict() { return c10::impl::GenericDict(c10::AnyType::get(), c10::AnyType::get()); }

TEST(SamplerOrder, AnEpochHasOneOrderAndTheNextOneFollowsIt) {
  SamplerOrder order(std::make_shared<Rotating>(), 4);
  const Indices first{0, 1, 2, 3}, second{1, 2, 3, 0};
  EXPECT_EQ(order.of_epoch(0), first);
  const int64_t hash = order.hash();
  EXPECT_EQ(order.of_epoch(0), first);
  EXPECT_EQ(order.hash(), hash);
  EXPECT_EQ(order.of_epoch(1), second);
  EXPECT_NE(order.hash(), hash);
}

TEST(SamplerOrder, ContinuesWithinAnEpoch) {
  SamplerOrder stopped(std::make_shared<Rotating>(), 4);
  stopped.of_epoch(0);
  const Indices second = stopped.of_epoch(1);
  c10::impl::GenericDict state = empty_dict();
  stopped.insert_into(state, /*epoch=*/1, /*samples=*/2);
  SamplerOrder resumed(std::make_shared<Rotating>(), 4);
  resumed.resume_within(1, state.at("order").toInt(), state.at("sampler_before"), state.at("sampler"));
  EXPECT_EQ(resumed.of_epoch(1), second);
  EXPECT_EQ(resumed.of_epoch(2), stopped.of_epoch(2));
  SamplerOrder other(std::make_shared<Rotating>(), 4);
  other.resume_within(1, state.at("order").toInt() + 1, state.at("sampler_before"), state.at("sampler"));
  EXPECT_THROW(other.of_epoch(1), Error);
}

TEST(SamplerOrder, BetweenEpochsOnlyTheSamplersStateCounts) {
  SamplerOrder stopped(std::make_shared<Rotating>(), 4);
  stopped.of_epoch(0);
  c10::impl::GenericDict state = empty_dict();
  stopped.insert_into(state, /*epoch=*/1, /*samples=*/0);
  EXPECT_FALSE(state.contains("sampler_before"));
  SamplerOrder resumed(std::make_shared<Rotating>(), 4);
  resumed.resume(state.at("sampler"));
  EXPECT_EQ(resumed.of_epoch(1), stopped.of_epoch(1));
}

}  // namespace
}  // namespace lockstep::epoch_plan_test
