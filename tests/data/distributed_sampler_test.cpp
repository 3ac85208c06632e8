#include <lockstep/distributed_sampler.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "data/permutation.h"

namespace lockstep {
namespace {

using Indices = std::vector<int64_t>;

Indices indices(int64_t size, int world_size, int rank, DistributedSamplerOptions options, int64_t epoch = 0) {
  DistributedSampler sampler(size, Shard(rank, world_size), options);
  sampler.set_epoch(epoch);
  Indices result = sampler.indices();
  EXPECT_EQ(static_cast<int64_t>(result.size()), sampler.size());
  return result;
}

/// Lines of the golden file that start with `kind`, without it.
std::vector<std::istringstream> golden_lines(const std::string& kind) {
  std::ifstream file(LOCKSTEP_SOURCE_DIR "/tests/golden/sampler_orders.txt");
  EXPECT_TRUE(file.is_open());
  std::vector<std::istringstream> lines;
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(kind + " ")) lines.emplace_back(line.substr(kind.size()));
  return lines;
}

Indices rest_of(std::istringstream& line) {
  Indices values;
  for (int64_t value; line >> value;) values.push_back(value);
  return values;
}

TEST(DrawBelow, RejectsWhatWouldFavourSomeNumbers) {
  auto lines = golden_lines("draws");
  ASSERT_EQ(lines.size(), 3u);
  for (auto& line : lines) {
    uint64_t seed = 0, limit = 0;
    line >> seed >> limit;
    std::mt19937_64 generator(seed);
    int drawn = 0;
    for (uint64_t expected; line >> expected; ++drawn) EXPECT_EQ(draw_below(limit, generator), expected);
    EXPECT_EQ(drawn, 20);
  }
}

TEST(Permutation, IsTheGoldenOne) {
  auto lines = golden_lines("permutation");
  ASSERT_EQ(lines.size(), 30u);
  for (auto& line : lines) {
    uint64_t seed = 0;
    int64_t size = 0;
    line >> seed >> size;
    EXPECT_EQ(permutation(size, seed), rest_of(line)) << "seed " << seed << ", size " << size;
  }
}

TEST(Permutation, IsTheGoldenOneWhenLong) {
  auto lines = golden_lines("checksum");
  ASSERT_EQ(lines.size(), 2u);
  for (auto& line : lines) {
    uint64_t seed = 0, expected = 0, sum = 0;
    int64_t size = 0;
    line >> seed >> size >> expected;
    Indices order = permutation(size, seed);
    for (int64_t place = 0; place < size; ++place) sum += static_cast<uint64_t>((place + 1) * order[place]);
    EXPECT_EQ(sum, expected);
    std::sort(order.begin(), order.end());
    for (int64_t i = 0; i < size; ++i) ASSERT_EQ(order[i], i);
  }
}

TEST(DistributedSampler, DoesWhatPythonsDoes) {
  auto lines = golden_lines("indices");
  ASSERT_EQ(lines.size(), 9u * (1 + 2 + 3 + 4 + 8) * 2 * 4);
  for (auto& line : lines) {
    int64_t size = 0, epoch = 0;
    int world_size = 0, rank = 0;
    uint64_t seed = 0;
    DistributedSamplerOptions options;
    line >> size >> world_size >> rank >> options.drop_last >> options.shuffle >> seed >> epoch;
    options.seed = seed;
    ASSERT_TRUE(line);
    if (size == 0) {  // Python's runs through an empty epoch
      EXPECT_TRUE(rest_of(line).empty());
      EXPECT_THROW(DistributedSampler(size, Shard(rank, world_size), options), std::invalid_argument);
      continue;
    }
    EXPECT_EQ(indices(size, world_size, rank, options, epoch), rest_of(line)) << line.str();
  }
}

TEST(DistributedSampler, TenSamplesOnThreeRanks) {
  EXPECT_EQ(indices(10, 3, 0, {.shuffle = false}), (Indices{0, 3, 6, 9}));
  EXPECT_EQ(indices(10, 3, 1, {.shuffle = false}), (Indices{1, 4, 7, 0}));
  EXPECT_EQ(indices(10, 3, 2, {.shuffle = false}), (Indices{2, 5, 8, 1}));
  EXPECT_EQ(indices(10, 3, 0, {.shuffle = false, .drop_last = true}), (Indices{0, 3, 6}));
  EXPECT_EQ(indices(10, 3, 2, {.shuffle = false, .drop_last = true}), (Indices{2, 5, 8}));
  EXPECT_EQ(indices(10, 3, 0, {.shuffle = false, .exactly_once = true}), (Indices{0, 3, 6, 9}));
  EXPECT_EQ(indices(10, 3, 1, {.shuffle = false, .exactly_once = true}), (Indices{1, 4, 7}));
}

TEST(DistributedSampler, ExactlyOnceOverAllRanks) {
  for (bool shuffle : {false, true})
    for (int64_t size : {1, 7, 10, 100})
      for (int world_size = 1; world_size <= 8; ++world_size) {
        Indices all;
        for (int rank = 0; rank < world_size; ++rank) {
          const Indices mine = indices(size, world_size, rank, {.shuffle = shuffle, .exactly_once = true}, 3);
          EXPECT_LE(std::abs(static_cast<int64_t>(mine.size()) * world_size - size), world_size - 1);
          all.insert(all.end(), mine.begin(), mine.end());
        }
        std::sort(all.begin(), all.end());
        Indices expected(size);
        for (int64_t i = 0; i < size; ++i) expected[i] = i;
        EXPECT_EQ(all, expected) << size << " samples on " << world_size << " ranks";
      }
}

TEST(DistributedSampler, EpochsDifferAndRepeat) {
  EXPECT_NE(indices(100, 2, 1, {}, 0), indices(100, 2, 1, {}, 1));
  EXPECT_EQ(indices(100, 2, 1, {}, 1), indices(100, 2, 1, {}, 1));
  EXPECT_EQ(indices(100, 2, 1, {.seed = 4}, 3), indices(100, 2, 1, {.seed = 7}, 0)) << "the order is of seed + epoch";
}

TEST(DistributedSampler, RefusesWhatMakesNoSense) {
  EXPECT_THROW(DistributedSampler(10, Shard(3, 3)), std::invalid_argument);
  EXPECT_THROW(DistributedSampler(10, Shard(-1, 3)), std::invalid_argument);
  EXPECT_THROW(DistributedSampler(10, Shard(0, 0)), std::invalid_argument);
  EXPECT_THROW(DistributedSampler(-1, Shard(0, 1)), std::invalid_argument);
  EXPECT_THROW(DistributedSampler(0, Shard(0, 1)), std::invalid_argument);
  EXPECT_THROW(DistributedSampler(10, Shard(0, 2), {.drop_last = true, .exactly_once = true}), std::invalid_argument);
}

}  // namespace
}  // namespace lockstep
