#include "data_parallel/block_cache.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace lockstep {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

TEST(BlockCache, GivesTheSameBlockAgain) {
  BlockCache cache;
  void* block = cache.take(5 * kMiB);
  EXPECT_TRUE(cache.owns(block));
  std::memset(block, 1, 5 * kMiB);
  cache.give_back(block);
  EXPECT_FALSE(cache.owns(block));
  EXPECT_EQ(cache.take(5 * kMiB - 1000), block) << "the same size, rounded up";
  EXPECT_NE(cache.take(5 * kMiB), block) << "it is in use";
}

TEST(BlockCache, RoundsUpByAnEighthAtMost) {
  for (size_t bytes = BlockCache::kSmallest; bytes < 100 * kMiB; bytes += 777'777) {
    BlockCache cache;
    void* block = cache.take(bytes);
    EXPECT_GE(cache.sizes().in_use, bytes);
    EXPECT_LE(cache.sizes().in_use, bytes + bytes / 8);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % 4096, 0u);
    static_cast<char*>(block)[bytes - 1] = 1;
    cache.give_back(block);
  }
}

TEST(BlockCache, KeepsLittleMoreThanWasInUseAtOnce) {
  BlockCache cache;
  for (const size_t size : {8, 9, 10, 11, 12, 13, 14, 15, 16}) {  // as batches of texts vary
    void* block = cache.take(size * kMiB);
    cache.give_back(block);
    EXPECT_LE(cache.sizes().kept, size * kMiB * 3 / 2);
  }
}

/// A forward takes many small blocks, and the backward that frees them a few large ones.
TEST(BlockCache, TightSizesShareMemory) {
  BlockCache cache;
  cache.tight(true);
  for (int step = 0; step < 10; ++step) {
    std::vector<void*> small, large;
    for (int i = 0; i < 64; ++i) small.push_back(cache.take(kMiB / 2));
    while (!small.empty()) {
      for (int i = 0; i < 8; ++i) cache.give_back(small.back()), small.pop_back();
      large.push_back(cache.take(4 * kMiB));
    }
    const BlockCache::Sizes sizes = cache.sizes();
    EXPECT_EQ(sizes.most_in_use, 32 * kMiB);
    EXPECT_LE(sizes.in_use + sizes.kept, 36 * kMiB);
    for (void* block : large) cache.give_back(block);
    cache.end_step();
  }
}

TEST(BlockCache, WhatWasInUseOnceCountsForThreeSteps) {
  BlockCache cache;
  cache.tight(true);
  cache.give_back(cache.take(64 * kMiB));
  for (int step = 0; step < 4; ++step) {
    EXPECT_EQ(cache.sizes().most_in_use, 64 * kMiB);
    for (const size_t size : {4, 5}) cache.give_back(cache.take(size * kMiB));
    cache.end_step();
  }
  EXPECT_EQ(cache.sizes().most_in_use, 5 * kMiB);
  EXPECT_EQ(cache.sizes().kept, 5 * kMiB);
}

TEST(BlockCache, ReleasesWhatNobodyTakesForThreeSteps) {
  BlockCache cache;
  void *always = cache.take(4 * kMiB), *once = cache.take(3 * kMiB);
  cache.give_back(once);
  cache.give_back(always);
  for (int step = 0; step < 3; ++step) {
    cache.end_step();
    EXPECT_EQ(cache.sizes().kept, 7 * kMiB);
    EXPECT_EQ(cache.take(4 * kMiB), always);
    cache.give_back(always);
  }
  cache.end_step();
  EXPECT_EQ(cache.sizes().kept, 4 * kMiB);
  for (int step = 0; step < 4; ++step) cache.end_step();
  EXPECT_EQ(cache.sizes().kept, 0u);
}

TEST(BlockCache, EvaluationAloneReleasesWhatTrainingLeft) {
  BlockCache cache;
  for (int step = 0; step < 5; ++step) {
    std::vector<void*> blocks;
    for (int i = 0; i < 30; ++i) blocks.push_back(cache.take(4 * kMiB));
    for (void* block : blocks) cache.give_back(block);
    cache.end_step();
  }
  EXPECT_EQ(cache.sizes().kept, 120 * kMiB);
  for (int batch = 0; batch < 200; ++batch) {
    void* both[] = {cache.take(2 * kMiB), cache.take(4 * kMiB)};
    for (void* block : both) cache.give_back(block);
  }
  EXPECT_LE(cache.sizes().kept, 6 * kMiB);
}

TEST(BlockCache, KeepsNothingOnceTold) {
  BlockCache cache;
  void *kept = cache.take(4 * kMiB), *taken = cache.take(3 * kMiB);
  cache.give_back(kept);
  cache.keep(false);
  EXPECT_EQ(cache.sizes().kept, 0u);
  EXPECT_EQ(cache.sizes().most_in_use, 3 * kMiB);
  cache.give_back(taken);
  EXPECT_EQ(cache.sizes().kept, 0u);
  EXPECT_EQ(cache.sizes().in_use, 0u);
  cache.keep(true);
  cache.give_back(cache.take(5 * kMiB));
  EXPECT_EQ(cache.sizes().kept, 5 * kMiB);
}

/// Takes, marks, checks and gives back blocks in random order; returns what went wrong.
std::string use(BlockCache& cache, unsigned seed, int times) {
  std::mt19937 chance(seed);
  struct Mine {
    uint64_t* words;
    size_t count;
    uint64_t mark;
  };
  std::deque<Mine> mine;
  for (int i = 0; i < times; ++i) {
    if (mine.size() < 8 && chance() % 2 == 0) {
      const size_t bytes = kMiB + chance() % (4 * kMiB);
      auto* words = static_cast<uint64_t*>(cache.take(bytes));
      if (words == nullptr) return "no memory";
      mine.push_back({words, bytes / 8, chance()});
      words[0] = words[bytes / 16] = words[bytes / 8 - 1] = mine.back().mark;
    } else if (!mine.empty()) {
      std::swap(mine[chance() % mine.size()], mine.front());
      const auto [words, count, mark] = mine.front();
      mine.pop_front();
      if (words[0] != mark || words[count / 2] != mark || words[count - 1] != mark) return "written by another";
      cache.give_back(words);
    }
    if (chance() % 16 == 0) cache.end_step();
    const auto sizes = cache.sizes();
    if (sizes.in_use + sizes.kept > sizes.most_in_use + sizes.most_in_use / 2) return "keeps too much";
  }
  for (const Mine& block : mine) cache.give_back(block.words);
  return "";
}

TEST(BlockCache, AnyOrderOfUse) {
  BlockCache cache;
  EXPECT_EQ(use(cache, 1, 20'000), "");
  EXPECT_EQ(cache.sizes().in_use, 0u);
}

TEST(BlockCache, SeveralThreads) {
  BlockCache cache;
  std::vector<std::string> wrong(4);
  {
    std::vector<std::jthread> threads;
    for (unsigned i = 0; i < wrong.size(); ++i) threads.emplace_back([&, i] { wrong[i] = use(cache, i, 5'000); });
  }
  EXPECT_EQ(wrong, std::vector<std::string>(4));
  EXPECT_EQ(cache.sizes().in_use, 0u);
}

TEST(BlockCache, WhereMemoryEndsNothingIsKept) {
  BlockCache cache;
  void* both[] = {cache.take(300 * kMiB), cache.take(500 * kMiB)};
  for (void* block : both) cache.give_back(block);
  EXPECT_EQ(cache.take(size_t{1} << 50), nullptr);  // no process has such addresses
  EXPECT_EQ(cache.sizes().kept, 0u);
  EXPECT_EQ(cache.sizes().in_use, 0u);
}

}  // namespace
}  // namespace lockstep
