#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <lockstep/data_loader.h>
#include <lockstep/datasets.h>
#include <lockstep/error.h>
#include <lockstep/example_loader.h>
#include <lockstep/progress.h>
#include <lockstep/sampler.h>
#include <lockstep/transforms.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <filesystem>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "data/idx_writer.h"
#include "data/numbers.h"
#include "support/complaint.h"

namespace lockstep {
namespace {

using Indices = std::vector<int64_t>;
using Batches = std::vector<Indices>;
using testing::Numbers;

Indices values(const at::Tensor& data) { return {data.data_ptr<int64_t>(), data.data_ptr<int64_t>() + data.numel()}; }

Batches one_pass(DataLoader& loader) {
  Batches batches;
  for (auto& [data, target] : loader) {
    EXPECT_TRUE(at::equal(data, target));
    batches.push_back(values(data));
  }
  EXPECT_EQ(static_cast<int64_t>(batches.size()), loader.size());
  int64_t samples = 0;
  for (const auto& batch : batches) samples += static_cast<int64_t>(batch.size());
  EXPECT_EQ(samples, loader.samples());
  return batches;
}

Indices flat(const Batches& batches) {
  Indices all;
  for (const auto& batch : batches) all.insert(all.end(), batch.begin(), batch.end());
  return all;
}

Indices sorted(Indices values) {
  std::sort(values.begin(), values.end());
  return values;
}

Indices count_up_to(int64_t size) {
  Indices all(size);
  for (int64_t i = 0; i < size; ++i) all[i] = i;
  return all;
}

TEST(DataLoader, BatchesInOrder) {
  DataLoader loader(Numbers(7), Shard(0, 1), {.batch_size = 3});
  EXPECT_EQ(one_pass(loader), (Batches{{0, 1, 2}, {3, 4, 5}, {6}}));
  EXPECT_EQ(loader.dataset_size(), 7);
  DataLoader full(Numbers(7), Shard(0, 1), {.batch_size = 3, .drop_last = true});
  EXPECT_EQ(one_pass(full), (Batches{{0, 1, 2}, {3, 4, 5}}));
}

TEST(DataLoader, TheNumberOfWorkersChangesNothing) {
  Batches expected;
  for (int workers : {0, 1, 2, 4}) {
    DataLoader loader(Numbers(1000), Shard(1, 3, 5), {.batch_size = 7, .shuffle = true, .workers = workers});
    const Batches batches = one_pass(loader);
    if (expected.empty()) expected = batches;
    EXPECT_EQ(batches, expected) << workers << " workers";
  }
  EXPECT_NE(flat(expected), sorted(flat(expected)));
}

TEST(DataLoader, EveryRankHasBatchesOfTheSameSizes) {
  for (bool drop_last : {false, true})
    for (int64_t size : {1, 7, 10, 100})
      for (int world_size = 1; world_size <= 8; ++world_size) {
        if (drop_last && size / world_size < 4) continue;  // refused, see OptionsThatMakeNoSense
        std::vector<size_t> expected;
        for (int rank = 0; rank < world_size; ++rank) {
          DataLoader loader(Numbers(size), Shard(rank, world_size),
                            {.batch_size = 4, .shuffle = true, .drop_last = drop_last});
          std::vector<size_t> sizes;
          for (const auto& batch : one_pass(loader)) sizes.push_back(batch.size());
          if (rank == 0) expected = sizes;
          EXPECT_EQ(sizes, expected) << size << " samples, rank " << rank << " of " << world_size;
          for (size_t batch_size : sizes) EXPECT_TRUE(batch_size == 4 || !drop_last);
        }
      }
}

TEST(DataLoader, RanksTogetherAreOneProcessWithLargerBatches) {
  for (int world_size : {2, 3}) {
    DataLoader whole(Numbers(60), Shard(0, 1, 9), {.batch_size = 5 * world_size, .shuffle = true});
    const Batches expected = one_pass(whole);
    Batches together(expected.size());
    for (int rank = 0; rank < world_size; ++rank) {
      DataLoader loader(Numbers(60), Shard(rank, world_size, 9), {.batch_size = 5, .shuffle = true});
      const Batches batches = one_pass(loader);
      ASSERT_EQ(batches.size(), expected.size());
      for (size_t i = 0; i < batches.size(); ++i)
        together[i].insert(together[i].end(), batches[i].begin(), batches[i].end());
    }
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(sorted(together[i]), sorted(expected[i]));
  }
}

TEST(DataLoader, ABatchOfTheWholeWorldIsDividedAmongTheRanks) {
  for (int world_size : {1, 2, 3})
    for (int64_t size : {60, 61, 65}) {
      DataLoader whole(Numbers(size), Shard(0, 1, 9), {.batch_size = 12, .shuffle = true});
      const Batches expected = one_pass(whole);
      Batches together(expected.size());
      for (int rank = 0; rank < world_size; ++rank) {
        DataLoader loader(Numbers(size), Shard(rank, world_size, 9),
                          {.batch_size = 12, .split_batches = true, .shuffle = true});
        EXPECT_EQ(loader.options().batch_size, 12);
        const Batches batches = one_pass(loader);
        ASSERT_EQ(batches.size(), expected.size());
        for (size_t i = 0; i < batches.size(); ++i)
          together[i].insert(together[i].end(), batches[i].begin(), batches[i].end());
      }
      for (size_t i = 0; i + 1 < expected.size(); ++i) EXPECT_EQ(sorted(together[i]), sorted(expected[i]));
      EXPECT_EQ(together.back().size(), (expected.back().size() + world_size - 1) / world_size * world_size);
    }
}

TEST(DataLoader, KnowsWhatPartOfABatchIsNoRepetition) {
  using Share = std::array<int64_t, 3>;
  const auto shares = [](DataLoaderOptions options, Shard shard) {
    DataLoader loader(Numbers(11), shard, options);
    std::vector<Share> all;
    const auto note = [&] {
      const auto share = loader.batch_share();
      all.push_back({share.here, share.in_all, share.on_all_ranks ? 1 : 0});
    };
    note();
    for ([[maybe_unused]] auto& batch : loader) note();
    note();
    return all;
  };
  EXPECT_EQ(shares({.batch_size = 3}, Shard(1, 2)), (std::vector<Share>{{0, 0, 1}, {3, 6, 1}, {3, 5, 1}, {0, 0, 1}}));
  EXPECT_EQ(shares({.batch_size = 3}, Shard(2, 3)), (std::vector<Share>{{0, 0, 1}, {3, 9, 1}, {1, 2, 1}, {0, 0, 1}}));
  EXPECT_EQ(shares({.batch_size = 3, .drop_last = true}, Shard(2, 3)),
            (std::vector<Share>{{0, 0, 1}, {3, 9, 1}, {0, 0, 1}}));
  EXPECT_EQ(shares({.batch_size = 4, .exactly_once = true}, Shard(1, 2)),
            (std::vector<Share>{{0, 0, 1}, {4, 8, 1}, {1, 3, 1}, {0, 0, 1}}));
  EXPECT_EQ(shares({.batch_size = 3, .exactly_once = true}, Shard(2, 3)),
            (std::vector<Share>{{0, 0, 1}, {3, 9, 0}, {0, 0, 0}}));
}

TEST(DataLoader, ExactlyOnceOverAllRanks) {
  for (int64_t size : {1, 7, 10, 100})
    for (int world_size = 1; world_size <= 8; ++world_size) {
      Indices all;
      for (int rank = 0; rank < world_size; ++rank) {
        DataLoader loader(Numbers(size), Shard(rank, world_size), {.batch_size = 4, .exactly_once = true});
        const Indices mine = flat(one_pass(loader));
        all.insert(all.end(), mine.begin(), mine.end());
      }
      EXPECT_EQ(sorted(all), count_up_to(size)) << size << " samples on " << world_size << " ranks";
    }
}

// ---- epochs ----

/// The order that a fresh loader has in `epoch`.
Batches order_of(int epoch) {
  DataLoader loader(Numbers(50), Shard(0, 1), {.batch_size = 8, .shuffle = true});
  loader.set_epoch(epoch);
  return one_pass(loader);
}

TEST(DataLoader, EachPassOutsideOfEpochsIsANewOne) {
  DataLoader loader(Numbers(50), Shard(0, 1), {.batch_size = 8, .shuffle = true});
  for (int epoch = 0; epoch < 4; ++epoch) {
    EXPECT_EQ(loader.epoch(), epoch);
    EXPECT_EQ(one_pass(loader), order_of(epoch));
  }
  EXPECT_NE(order_of(0), order_of(1));
}

TEST(DataLoader, PassesWithinAnEpochAreAlike) {
  DataLoader loader(Numbers(50), Shard(0, 1), {.batch_size = 8, .shuffle = true});
  one_pass(loader);  // a look at the data beforehand changes nothing
  Indices seen;
  for (int epoch : loader.epochs(3)) {
    seen.push_back(epoch);
    EXPECT_EQ(loader.epoch(), epoch);
    EXPECT_EQ(loader.epoch_count(), 3);
    EXPECT_EQ(one_pass(loader), order_of(epoch));
    EXPECT_EQ(one_pass(loader), order_of(epoch));
  }
  EXPECT_EQ(seen, (Indices{0, 1, 2}));
  EXPECT_EQ(loader.epoch_count(), 0);
  EXPECT_EQ(one_pass(loader), order_of(3));
}

TEST(DataLoader, EpochsGoOnAfterAResume) {
  DataLoader loader(Numbers(50), Shard(0, 1), {.batch_size = 8, .shuffle = true});
  loader.set_epoch(3);
  Indices seen;
  for (int epoch : loader.epochs(5)) {
    seen.push_back(epoch);
    EXPECT_EQ(one_pass(loader), order_of(epoch));
  }
  EXPECT_EQ(seen, (Indices{3, 4}));
  loader.set_epoch(5);
  for (int epoch : loader.epochs(5)) FAIL() << "training was over, but there is epoch " << epoch;
}

TEST(DataLoader, EpochsLeftEarly) {
  DataLoader loader(Numbers(50), Shard(0, 1), {.batch_size = 8, .shuffle = true});
  try {
    for (int epoch : loader.epochs(9))
      if (epoch == 1) throw std::runtime_error("enough");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(loader.epoch_count(), 0);
  EXPECT_EQ(one_pass(loader), order_of(2));
  int epochs = 0;
  for (int epoch : loader.epochs(2)) EXPECT_EQ(epoch, epochs++) << "a second loop starts like the first";
  EXPECT_EQ(epochs, 2);
}

TEST(DataLoader, EpochsAreNotMixedUp) {
  DataLoader loader(Numbers(50), Shard(0, 1), {.batch_size = 8, .shuffle = true});
  for (int epoch : loader.epochs(2)) {
    loader.set_epoch(epoch);  // a habit from Python
    EXPECT_THROW(loader.set_epoch(epoch + 1), c10::Error);
    EXPECT_THROW(
        {
          for (int inner : loader.epochs(2)) FAIL() << inner;
        },
        c10::Error);
  }
  EXPECT_THROW(loader.set_epoch(-1), c10::Error);
  EXPECT_THROW(loader.epochs(-1), c10::Error);
  for (int epoch : loader.epochs(0)) FAIL() << epoch;
}

TEST(DataLoader, TheSeedIsTheContextsUnlessGiven) {
  const auto order = [](uint64_t context_seed, std::optional<uint64_t> seed) {
    DataLoader loader(Numbers(50), Shard(0, 1, context_seed), {.shuffle = true, .seed = seed});
    return one_pass(loader);
  };
  EXPECT_NE(order(1, {}), order(2, {}));
  EXPECT_EQ(order(1, 2), order(2, {}));
}

// ---- ending, failing ----

TEST(DataLoader, LeavingEarlyEndsThePass) {
  struct Counted : Numbers {
    Counted(int64_t size, std::atomic<int>* calls_, std::atomic<int>* under_way_)
        : Numbers(size), calls(calls_), under_way(under_way_) {}
    Batch get(at::ArrayRef<int64_t> indices) const override {
      ++*calls;
      ++*under_way;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      Batch batch = Numbers::get(indices);
      --*under_way;
      return batch;
    }
    std::atomic<int>* calls;
    std::atomic<int>* under_way;
  };
  std::atomic<int> calls{0}, under_way{0};
  DataLoader loader(Counted(100000, &calls, &under_way), Shard(0, 1), {.batch_size = 2, .workers = 3});
  for (int round = 0; round < 3; ++round) {
    calls = 0;
    int64_t expected = 0;
    for (auto& [data, target] : loader) {
      EXPECT_EQ(values(data), (Indices{expected, expected + 1}));
      if ((expected += 2) == 10) break;
    }
    EXPECT_EQ(under_way.load(), 0);
    EXPECT_LE(calls.load(), 5 + 6);
  }
}

struct Faulty : Numbers {
  using Numbers::Numbers;
  Batch get(at::ArrayRef<int64_t> indices) const override {
    if (std::find(indices.begin(), indices.end(), 13) != indices.end()) throw std::out_of_range("unlucky");
    return Numbers::get(indices);
  }
};

TEST(DataLoader, AnExceptionArrivesAtItsBatch) {
  for (int workers : {0, 1, 3}) {
    DataLoader loader(Faulty(100), Shard(0, 1), {.batch_size = 4, .workers = workers});
    for (int round = 0; round < 2; ++round) {
      int batches = 0;
      std::string text;
      try {
        for (auto& batch : loader) {
          (void)batch;
          ++batches;
        }
      } catch (const std::out_of_range& error) {
        text = error.what();
      }
      EXPECT_EQ(text, "unlucky");
      EXPECT_EQ(batches, 3);
    }
  }
}

TEST(DataLoader, ABatchWithoutDataIsNamed) {
  struct Empty : Numbers {
    using Numbers::Numbers;
    Batch get(at::ArrayRef<int64_t> indices) const override {
      return indices.front() == 8 ? Batch{} : Numbers::get(indices);
    }
  };
  for (const int workers : {0, 2}) {
    DataLoader loader(Empty(20), Shard(0, 1), {.batch_size = 4, .workers = workers});
    EXPECT_EQ(testing::complaint([&] { one_pass(loader); }),
              "DataLoader: the dataset was asked for 4 samples, the first of which is sample 8, but the `data` that it "
              "returned is an undefined tensor");
    DataLoader transformed(Transformed(Empty(20), {[](at::Tensor images, at::ArrayRef<uint64_t>) { return images; }}),
                           Shard(0, 1), {.batch_size = 4, .workers = workers});
    EXPECT_EQ(
        testing::complaint([&] { one_pass(transformed); }),
        "Transformed: the dataset was asked for 4 samples, the first of which is sample 8, but the `data` that it "
        "returned is an undefined tensor");
  }
}

TEST(DataLoader, TheDatasetIsKeptOnce) {
  struct Copied : Numbers {
    explicit Copied(std::atomic<int>* copies_) : Numbers(100), copies(copies_) {}
    Copied(const Copied& other) : Numbers(other), copies(other.copies) { ++*copies; }
    Copied(Copied&&) = default;
    std::atomic<int>* copies;
  };
  std::atomic<int> copies{0};
  DataLoader loader(Copied(&copies), Shard(0, 1), {.batch_size = 4, .workers = 4});
  one_pass(loader);
  DataLoader moved = std::move(loader);
  one_pass(moved);
  EXPECT_EQ(copies.load(), 0);
  const auto shared = std::make_shared<const Numbers>(5);
  DataLoader other(shared, Shard(0, 1));
  EXPECT_EQ(&other.dataset(), shared.get());
}

std::set<std::filesystem::path> threads_of_this_process() {
  return {std::filesystem::directory_iterator("/proc/self/task"), std::filesystem::directory_iterator()};
}

TEST(DataLoader, WorkersLeaveTheCoresToTraining) {
  // Its data: how many threads the process has gained by an operator that ATen likes to split among threads.
  struct Parallel : Numbers {
    using Numbers::Numbers;
    Batch get(at::ArrayRef<int64_t>) const override {
      const auto before = threads_of_this_process();
      at::ones({1 << 20}).add_(1).exp_();  // ATen's own loop, MKL's loop
      at::ones({256, 256}).mm(at::ones({256, 256}));
      int64_t gained = 0;
      for (const auto& thread : threads_of_this_process()) gained += before.contains(thread) ? 0 : 1;
      return {.data = at::full({1}, gained, at::kLong), .target = at::empty({1})};
    }
  };
  const int before = at::get_num_threads();
  at::set_num_threads(4);
  std::thread([] { EXPECT_GT(values(Parallel(1).get({0}).data), Indices{0}) << "so this test cannot fail"; }).join();
  DataLoader loader(Parallel(4), Shard(0, 1));
  for (auto& [data, target] : loader) EXPECT_EQ(values(data), Indices{0});
  EXPECT_EQ(at::get_num_threads(), 4);
  int there = 0;
  std::thread([&] { there = at::get_num_threads(); }).join();
  EXPECT_EQ(there, 4) << "threads made later must not inherit the workers' setting";
  at::set_num_threads(before);
}

TEST(DataLoader, OptionsThatMakeNoSense) {
  const auto failure = [](DataLoaderOptions options, Shard shard = Shard(0, 1)) {
    return failure_of<c10::Error>([&] { DataLoader(Numbers(10), shard, options); });
  };
  EXPECT_NE(failure({.batch_size = 0}).find("batch_size is 0; set it to"), std::string::npos);
  EXPECT_NE(failure({.batch_size = -4}).find("batch_size is -4"), std::string::npos);
  EXPECT_NE(failure({.workers = -1}).find("workers is -1"), std::string::npos);
  EXPECT_NE(failure({.prefetch = 0}).find("prefetch is 0"), std::string::npos);
  EXPECT_NE(failure({.drop_last = true, .exactly_once = true}).find("set only one"), std::string::npos);
  EXPECT_NE(failure({.batch_size = 4, .drop_last = true}, Shard(0, 3))
                .find("a rank's share is 3 of 10 samples, fewer than the batch_size of 4; lower the batch size"),
            std::string::npos);
  EXPECT_NE(failure({.batch_size = 8, .split_batches = true}, Shard(0, 3))
                .find("the batch_size of 8 is divided among 3 ranks, but does not divide evenly; set it to a multiple"),
            std::string::npos);
  EXPECT_NE(failure({}, Shard(3, 3)).find("rank 3 is not in a world of 3"), std::string::npos);
  EXPECT_THROW(DataLoader(std::shared_ptr<const Dataset>(), Shard(0, 1)), c10::Error);
}

struct NoExamples {
  int64_t size() const { return 0; }
  at::Tensor get(int64_t) const { return at::ones({1}); }
};

struct NoPlaces : Sampler {
  int64_t size() const override { return 0; }
  std::vector<int64_t> order(int) override { return {}; }
};

TEST(DataLoader, RefusesWhatHasNoSamples) {
  for (const Shard& shard : {Shard(0, 1), Shard(1, 2), Shard(2, 3)}) {
    EXPECT_EQ(testing::complaint([&] {
                DataLoader(Numbers(0), shard);
              }).find("DataLoader: the dataset has no samples: size() of the "),
              0u);
    EXPECT_NE(testing::complaint([&] { DataLoader(Numbers(0), shard); }).find("Numbers is 0"), std::string::npos);
    EXPECT_EQ(testing::complaint([&] { ExampleLoader(NoExamples(), shard); }),
              "DataLoader: the dataset has no samples: its size() is 0");
    EXPECT_EQ(testing::complaint([&] { DataLoader(Numbers(5), shard, {.sampler = std::make_shared<NoPlaces>()}); }),
              "DataLoader: the sampler is empty: its size() is 0");
  }
}

// ---- with its neighbours ----

struct FakeContext {
  int rank() const { return 1; }
  int world_size() const { return 2; }
  uint64_t seed() const { return 42; }
};

TEST(DataLoader, TakesItsPlaceFromAContext) {
  const FakeContext context;
  DataLoader loader(Numbers(5), context, {.batch_size = 2});
  EXPECT_EQ(one_pass(loader), (Batches{{1, 3}, {0}}));
  static_assert(std::input_iterator<DataLoader::Iterator>);
}

TEST(DataLoader, ReportsItsProgress) {
  DataLoader loader(Numbers(10), Shard(0, 1), {.batch_size = 4});
  ::testing::internal::CaptureStderr();
  for (int epoch : loader.epochs(2)) {
    (void)epoch;
    auto bar = progress(loader);
    for (auto& [data, target] : bar) {
      at::Tensor taken = std::move(data);
      bar.loss(static_cast<double>(taken.numel()));
    }
  }
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(text.find("epoch 1/2  step 3/3  loss 2.0000  "), 0u) << text;
  EXPECT_NE(text.find("\nepoch 2/2  step 3/3  loss 2.0000  "), std::string::npos) << text;
}

TEST(DataLoader, ProgressGoesOnWhereTheEpochDoes) {
  DataLoader stopped(Numbers(20), Shard(0, 1), {.batch_size = 4});
  c10::IValue state;
  for ([[maybe_unused]] auto& batch : stopped) {
    state = stopped.state_dict();
    if (state.toGenericDict().at("samples").toInt() == 12) break;
  }
  DataLoader loader(Numbers(20), Shard(0, 1), {.batch_size = 4});
  EXPECT_EQ(std::pair(loader.first_step(), loader.steps_left()), std::pair(int64_t{0}, int64_t{5}));
  loader.load_state_dict(state);
  EXPECT_EQ(std::pair(loader.first_step(), loader.steps_left()), std::pair(int64_t{3}, int64_t{2}));
  ::testing::internal::CaptureStderr();
  for (int epoch : loader.epochs(2)) {
    (void)epoch;
    for ([[maybe_unused]] auto& batch : progress(loader)) {
    }
  }
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(text.find("epoch 1/2  step 5/5"), 0u) << text;
  EXPECT_NE(text.find("\nepoch 2/2  step 5/5"), std::string::npos) << text;
  // Other batch sizes and ranks: what was done rounds up to steps of theirs.
  DataLoader other(Numbers(20), Shard(1, 2), {.batch_size = 5});
  other.load_state_dict(state);
  EXPECT_EQ(std::pair(other.first_step(), other.steps_left()), std::pair(int64_t{2}, int64_t{1}));
}

TEST(DataLoader, IsFarFasterThanTraining) {
  if (!std::filesystem::exists("/usr/share/datasets/fashion-mnist"))
    GTEST_SKIP() << "no /usr/share/datasets/fashion-mnist: apt-get install dataset-fashion-mnist";
  const auto data = std::make_shared<const datasets::FashionMNIST>("/usr/share/datasets/fashion-mnist", kTrain);
  for (int workers : {0, 1, 2}) {
    DataLoader loader(data, Shard(0, 1), {.batch_size = 128, .shuffle = true, .workers = workers});
    const auto start = Clock::now();
    int64_t samples = 0;
    for (auto& batch : loader) samples += batch.target.size(0);
    const double rate = static_cast<double>(samples) / seconds_since(start);
    RecordProperty("samples_per_second_workers_" + std::to_string(workers), static_cast<int>(rate));
    std::fprintf(stderr, "%d workers: %.0f samples/s\n", workers, rate);
    EXPECT_EQ(samples, 60000);
    EXPECT_GT(rate, 50000) << "training takes some 10,000 a second";
  }
}

TEST(DataLoaderState, OptionsThatChangeWhichSamplesCountAreCompared) {
  const auto loader = [](bool drop_last, bool exactly_once) {
    return DataLoader(Numbers(10), Shard(0, 1),
                      {.batch_size = 3, .drop_last = drop_last, .exactly_once = exactly_once});
  };
  const c10::IValue plain = loader(false, false).state_dict();
  const auto refused = [&](bool drop_last, bool exactly_once, const c10::IValue& state) {
    auto other = loader(drop_last, exactly_once);
    try {
      other.load_state_dict(state);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(refused(false, false, plain), "");
  EXPECT_NE(refused(true, false, plain).find("whose drop_last was 0, not 1"), std::string::npos);
  EXPECT_NE(refused(false, true, plain).find("whose exactly_once was 0, not 1"), std::string::npos);
  auto old = plain.toGenericDict().copy();  // of a release that did not write them
  (void)old.erase(std::string("drop_last"));
  (void)old.erase(std::string("exactly_once"));
  EXPECT_EQ(refused(true, false, old), "");
}

}  // namespace
}  // namespace lockstep
