#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <lockstep/data_loader.h>
#include <lockstep/error.h>
#include <lockstep/sampler.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "checkpoint/failure.h"
#include "data/numbers.h"
#include "support/complaint.h"

namespace lockstep {
namespace {

using testing::complaint;
using testing::failure;
using testing::Numbers;
using Order = std::vector<int64_t>;

constexpr int64_t kSamples = 30;

/// Every third sample, from one that each order moves on; what moves it is its state.
struct Drifting : Sampler {
  int64_t size() const override { return 22; }
  Order order(int /*epoch*/) override {
    Order all;
    for (int64_t i = 0; i < size(); ++i) all.push_back((begin + 3 * i) % kSamples);
    begin += step;
    return all;
  }
  c10::IValue state_dict() const override { return std::vector<int64_t>{begin, step}; }
  void load_state_dict(const c10::IValue& state) override {
    begin = state.toIntVector()[0];
    step = state.toIntVector()[1];
  }
  int64_t begin = 1, step = 7;
};

/// The one of the header's example.
struct Weighted : Sampler {
  Weighted(at::Tensor weights_, uint64_t seed_) : weights(std::move(weights_)), seed(seed_) {}
  int64_t size() const override { return weights.size(0); }
  Order order(int epoch) override {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed + static_cast<uint64_t>(epoch));
    const at::Tensor drawn = at::multinomial(weights, size(), /*replacement=*/true, generator);
    return {drawn.data_ptr<int64_t>(), drawn.data_ptr<int64_t>() + drawn.numel()};
  }
  at::Tensor weights;
  uint64_t seed;
};

/// A loader of one rank, with a sampler of its own.
struct Rank {
  Rank(int rank, int world_size, int64_t batch_size, bool drop_last = false, bool exactly_once = false)
      : loader(Numbers(kSamples), Shard(rank, world_size, 3),
               {.batch_size = batch_size, .sampler = sampler, .drop_last = drop_last, .exactly_once = exactly_once}) {}
  std::shared_ptr<Drifting> sampler = std::make_shared<Drifting>();
  DataLoader loader;
};

std::vector<std::unique_ptr<Rank>> make_ranks(int world_size, int64_t batch_size, bool drop_last = false,
                                              bool exactly_once = false) {
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int rank = 0; rank < world_size; ++rank)
    ranks.push_back(std::make_unique<Rank>(rank, world_size, batch_size, drop_last, exactly_once));
  return ranks;
}

/// What all ranks together take in a pass, put back into one order; at most `steps` batches of each.
Order pass_of(std::vector<std::unique_ptr<Rank>>& ranks, int64_t steps = 1000) {
  std::vector<Order> taken(ranks.size());
  size_t most = 0;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    int64_t step = 0;
    for (auto& [data, target] : ranks[rank]->loader) {
      taken[rank].insert(taken[rank].end(), data.data_ptr<int64_t>(), data.data_ptr<int64_t>() + data.numel());
      if (++step == steps) break;
    }
    most = std::max(most, taken[rank].size());
  }
  Order all;
  for (size_t i = 0; i < most; ++i)
    for (const Order& mine : taken)
      if (i < mine.size()) all.push_back(mine[i]);
  return all;
}

/// By the formula above.
Order expected(int64_t begin, int64_t from = 0, int64_t to = 22) {
  Order all;
  for (int64_t i = from; i < to; ++i) all.push_back((begin + 3 * i) % kSamples);
  return all;
}

TEST(Sampler, ItsOrderIsDealtOutAmongTheRanks) {
  for (const int world_size : {1, 2, 3}) {
    auto ranks = make_ranks(world_size, 4);
    Order order = expected(1);
    for (size_t i = 0; order.size() % static_cast<size_t>(world_size) != 0; ++i) order.push_back(order[i]);
    EXPECT_EQ(pass_of(ranks), order) << "padded as every epoch is";
    EXPECT_EQ(ranks[0]->loader.samples(), static_cast<int64_t>(order.size()) / world_size);
    auto whole = make_ranks(world_size, 4, /*drop_last=*/true);
    const int64_t batch = 4 * world_size;
    EXPECT_EQ(pass_of(whole), expected(1, 0, 22 / batch * batch));
    auto once = make_ranks(world_size, 4, false, /*exactly_once=*/true);
    EXPECT_EQ(pass_of(once), expected(1));
  }
}

TEST(Sampler, PassesOfOneEpochAreAlikeAndTheNextGoesOnFromOneOfThem) {
  auto ranks = make_ranks(2, 4);
  DataLoader& loader = ranks[0]->loader;
  int64_t begin = 1;
  for ([[maybe_unused]] int epoch : loader.epochs(3)) {
    for (int pass = 0; pass < 2; ++pass) {
      Order seen;
      for (auto& [data, target] : loader) seen.push_back(data[0].item<int64_t>());
      EXPECT_EQ(seen, (Order{begin % 30, (begin + 24) % 30, (begin + 48) % 30}));
    }
    begin += 7;
  }
}

TEST(Sampler, AnEpochThatWasStoppedIsEndedByOtherRanksAndTheNextOnesFollow) {
  for (const int before : {2, 3})
    for (const int after : {1, 2, 3}) {
      auto ranks = make_ranks(before, 2);
      pass_of(ranks);           // epoch 0
      for (auto& rank : ranks)  // the sampler learns something during epoch 1: it is of the epochs that follow
        for ([[maybe_unused]] auto& batch : rank->loader) {
          rank->sampler->step = 5;
          if (rank->loader.state_dict().toGenericDict().at("samples").toInt() >= 4 * before) break;
        }
      const c10::IValue state = ranks[0]->loader.state_dict();
      auto resumed = make_ranks(after, 3);
      for (auto& rank : resumed) rank->loader.load_state_dict(state);
      const c10::IValue again = resumed[0]->loader.state_dict();
      EXPECT_EQ(again.toGenericDict().at("sampler").toIntVector(), state.toGenericDict().at("sampler").toIntVector());
      Order rest = pass_of(resumed);
      rest.resize(22 - 4 * static_cast<size_t>(before));  // without the padding
      EXPECT_EQ(rest, expected(8, 4 * before)) << before << " ranks, then " << after;
      Order next = pass_of(resumed);
      next.resize(22);
      EXPECT_EQ(next, expected(15));
      next = pass_of(resumed);
      next.resize(22);
      EXPECT_EQ(next, expected(20)) << "by the step that was set in the epoch that was stopped";
    }
}

TEST(Sampler, BetweenEpochsItsStateIsTheNextOnes) {
  auto ranks = make_ranks(2, 4);
  pass_of(ranks);
  auto resumed = make_ranks(3, 4);
  for (auto& rank : resumed) rank->loader.load_state_dict(ranks[0]->loader.state_dict());
  Order next = pass_of(resumed);
  next.resize(22);
  EXPECT_EQ(next, expected(8));
}

TEST(Sampler, WeightedDrawsAreOfTheWeights) {
  at::Tensor weights = at::zeros({kSamples});
  weights[4] = 1, weights[9] = 3;
  int64_t nines = 0, all = 0;

  for (int rank = 0; rank < 2; ++rank) {
    DataLoader loader(Numbers(kSamples), Shard(rank, 2),
                      {.batch_size = 5, .sampler = std::make_shared<Weighted>(weights, 11)});
    for (const int epoch : loader.epochs(40))
      for (auto& [data, target] : loader) {
        EXPECT_TRUE(data.eq(4).logical_or(data.eq(9)).all().item<bool>()) << epoch;
        nines += data.eq(9).sum().item<int64_t>();
        all += data.numel();
      }
  }
  EXPECT_EQ(all, 40 * kSamples);
  EXPECT_NEAR(static_cast<double>(nines) / static_cast<double>(all), 0.75, 0.06);  // 5 standard deviations
}

TEST(Sampler, WhatDoesNotFitIsSaid) {
  struct Fixed : Sampler {
    explicit Fixed(Order order, int64_t size = 3) : order_(std::move(order)), size_(size) {}
    int64_t size() const override { return size_; }
    Order order(int) override { return order_; }
    Order order_;
    int64_t size_;
  };
  const auto loader_of = [](Order order, int64_t size = 3, bool shuffle = false) {
    return DataLoader(Numbers(5), Shard(0, 1),
                      {.shuffle = shuffle, .sampler = std::make_shared<Fixed>(std::move(order), size)});
  };
  EXPECT_NE(complaint([&] {
              loader_of({0, 1, 5}).begin();
            }).find("contains the index 5, but the dataset has 5 samples"),
            std::string::npos);
  EXPECT_NE(complaint([&] {
              loader_of({0, 1}).begin();
            }).find("size() is 3, but its order() has 2 places"),
            std::string::npos);
  EXPECT_NE(complaint([&] { loader_of({0}, 1, true); }).find("so shuffle has no effect"), std::string::npos);

  DataLoader stopped = loader_of({0, 1, 2});
  c10::IValue state;
  for ([[maybe_unused]] auto& batch : stopped) {
    state = stopped.state_dict();
    break;
  }
  DataLoader other = loader_of({0, 2, 1}), longer = loader_of({0, 1, 2, 3}, 4), without(Numbers(5), Shard(0, 1));
  other.load_state_dict(state);
  EXPECT_NE(
      failure([&] { other.begin(); }).find("order of epoch 1 differs from the order in which the checkpoint was saved"),
      std::string::npos);
  EXPECT_NE(failure([&] { longer.load_state_dict(state); }).find("places was 3, not 4"), std::string::npos);
  EXPECT_NE(failure([&] { without.load_state_dict(state); }).find("with a sampler, but this one has none"),
            std::string::npos);
  EXPECT_NE(failure([&] { other.load_state_dict(without.state_dict()); }).find("without a sampler"), std::string::npos);
}

}  // namespace
}  // namespace lockstep
