#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <lockstep/example_loader.h>
#include <lockstep/progress.h>
#include <lockstep/transforms.h>

#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "support/complaint.h"

namespace lockstep {
namespace {

using testing::complaint;

using Sentence = std::map<std::string, at::Tensor>;

/// Sentence i has i % 5 + 1 tokens, each the number i.
struct Sentences {
  int64_t size() const { return samples; }
  Sentence get(int64_t index) const {
    const at::Tensor ids = at::full({index % 5 + 1}, index, at::kLong);
    return {{"ids", ids}, {"mask", at::ones_like(ids, at::kBool)}};
  }
  int64_t samples = 23;
};

/// Every tensor is filled up with zeros to the longest.
Sentence padded(std::vector<Sentence> examples) {
  Sentence batch;
  for (const char* key : {"ids", "mask"}) {
    int64_t longest = 0;
    for (const Sentence& example : examples) longest = std::max(longest, example.at(key).size(0));
    std::vector<at::Tensor> rows;
    for (const Sentence& example : examples)
      rows.push_back(at::constant_pad_nd(example.at(key), {0, longest - example.at(key).size(0)}));
    batch[key] = at::stack(rows);
  }
  return batch;
}

using Indices = std::vector<int64_t>;

/// The sentences of a batch, which must be as padded() makes it.
Indices sentences(const Sentence& batch) {
  const at::Tensor ids = batch.at("ids"), lengths = batch.at("mask").sum(1);
  Indices indices;
  for (int64_t row = 0; row < ids.size(0); ++row) {
    indices.push_back(ids[row][0].item<int64_t>());
    EXPECT_EQ(lengths[row].item<int64_t>(), indices.back() % 5 + 1);
    EXPECT_TRUE(ids[row].eq(indices.back()).logical_and(batch.at("mask")[row]).sum().equal(lengths[row]) ||
                indices.back() == 0);
  }
  EXPECT_EQ(ids.size(1), lengths.max().item<int64_t>());
  return indices;
}

template <typename Loader>
std::vector<Indices> one_pass_of(Loader& loader) {
  std::vector<Indices> batches;
  for (auto& batch : loader) batches.push_back(sentences(batch));
  EXPECT_EQ(static_cast<int64_t>(batches.size()), loader.size());
  return batches;
}

TEST(ExampleLoader, AFunctionPadsAndTheSharesAreTheDataLoaders) {
  for (const int world_size : {1, 2, 3})
    for (const int workers : {0, 3})
      for (int rank = 0; rank < world_size; ++rank) {
        const DataLoaderOptions options{.batch_size = 4, .shuffle = true, .workers = workers, .seed = 9};
        ExampleLoader loader(Sentences(), Shard(rank, world_size), options, padded);
        struct IndicesAlone : Dataset {
          int64_t size() const override { return Sentences().size(); }
          Batch get(at::ArrayRef<int64_t> indices) const override { return {at::tensor(indices), at::Tensor()}; }
        };
        DataLoader plain(IndicesAlone(), Shard(rank, world_size), options);
        std::vector<Indices> expected;
        for (auto& [data, target] : plain)
          expected.emplace_back(data.data_ptr<int64_t>(), data.data_ptr<int64_t>() + data.numel());
        EXPECT_EQ(one_pass_of(loader), expected);
        EXPECT_NE(one_pass_of(loader), expected) << "another epoch";
      }
}

TEST(ExampleLoader, GoesOnInTheMiddleOnAnotherNumberOfRanks) {
  for (const int before : {2, 3})
    for (const int after : {1, 2, 3}) {
      std::vector<int> seen(24);
      c10::IValue state;
      for (int rank = before - 1; rank >= 0; --rank) {
        ExampleLoader loader(Sentences{24}, Shard(rank, before, 4), {.batch_size = 2, .shuffle = true}, padded);
        for (auto& batch : loader) {
          for (const int64_t index : sentences(batch)) ++seen[static_cast<size_t>(index)];
          state = loader.state_dict();
          if (state.toGenericDict().at("samples").toInt() == 12) break;
        }
      }
      for (int rank = 0; rank < after; ++rank) {
        ExampleLoader loader(Sentences{24}, Shard(rank, after, 4), {.batch_size = 2, .shuffle = true}, padded);
        loader.load_state_dict(state);
        for (auto& batch : loader)
          for (const int64_t index : sentences(batch)) ++seen[static_cast<size_t>(index)];
      }
      EXPECT_EQ(seen, std::vector<int>(24, 1)) << before << " ranks, then " << after;
    }
}

// What torch.utils.data.default_collate makes of [(tensor([i, i + 1]), i, i / 2, i > 1, "i", [i, [tensor(i)]]), ...].
TEST(DefaultCollate, IsPyTorchs) {
  using Example = std::tuple<at::Tensor, int, double, bool, std::string, std::pair<float, std::vector<at::Tensor>>>;
  std::vector<Example> examples;
  for (int i = 1; i < 4; ++i)
    examples.emplace_back(at::tensor({i, i + 1}), i, i / 2.0, i > 1, std::to_string(i),
                          std::pair(static_cast<float>(i), std::vector{at::scalar_tensor(i, at::kInt)}));
  const auto [tensor, whole, real, truth, text, inner] = default_collate(examples);
  const auto expect_equal = [](const at::Tensor& is, const at::Tensor& expected) {
    EXPECT_TRUE(is.scalar_type() == expected.scalar_type() && is.equal(expected)) << is << expected;
  };
  expect_equal(tensor, at::tensor({1, 2, 2, 3, 3, 4}).reshape({3, 2}));
  expect_equal(whole, at::tensor({1, 2, 3}, at::kLong));
  expect_equal(real, at::tensor({0.5, 1.0, 1.5}, at::kDouble));
  expect_equal(truth, at::tensor({0, 1, 1}).to(at::kBool));
  EXPECT_EQ(text, (std::vector<std::string>{"1", "2", "3"}));
  expect_equal(std::get<0>(inner), at::tensor({1.0F, 2.0F, 3.0F}));
  ASSERT_EQ(std::get<1>(inner).size(), 1u);
  expect_equal(std::get<1>(inner)[0], at::tensor({1, 2, 3}));
}

TEST(DefaultCollate, SaysWhatDoesNotFit) {
  const auto of = [](std::vector<Sentence> examples) { return complaint([&] { default_collate(examples); }); };
  EXPECT_EQ(complaint([] { default_collate(std::vector<at::Tensor>{}); }),
            "default_collate: the batch has no examples; give it at least one");
  const at::Tensor three = at::zeros({3}), four = at::zeros({4});
  const std::string text = of({{{"a", three}}, {{"a", four}}});
  EXPECT_NE(text.find("example 1 of a batch has a tensor of [4], and the first one of [3]; give the loader a function"),
            std::string::npos)
      << text;
  EXPECT_NE(of({{{"a", three}}, {{"b", three}}}).find("an example has no `a`"), std::string::npos);
  EXPECT_NE(of({{{"a", three}}, {{"a", three}, {"b", three}}}).find("an example has 2 keys, and the first"),
            std::string::npos);
  EXPECT_EQ(of({{{"a", three}}, {{"a", at::Tensor()}}}),
            "default_collate: example 1 of a batch has an undefined tensor");
  EXPECT_EQ(of({{{"a", at::Tensor()}}, {{"a", three}}}),
            "default_collate: example 0 of a batch has an undefined tensor");
}

TEST(ExampleLoader, AnExampleWithoutItsTensorIsNamed) {
  struct Gaps {
    int64_t size() const { return 8; }
    Sentence get(int64_t index) const {
      return {{"a", at::ones({2})}, {"b", index == 5 ? at::Tensor() : at::ones({2})}};
    }
  };
  for (const int workers : {0, 2}) {
    int64_t batches = 0;
    ExampleLoader loader(Gaps(), Shard(0, 1), {.batch_size = 3, .workers = workers});
    EXPECT_EQ(complaint([&] {
                for (auto& batch : loader) batches += static_cast<int64_t>(batch.size()) / 2;
              }),
              "ExampleLoader: example 5 of the dataset has an undefined tensor; get() must give every tensor a value");
    EXPECT_EQ(batches, 1);
    // A function of the program's may do without.
    ExampleLoader own(Gaps(), Shard(0, 1), {.batch_size = 3, .workers = workers},
                      [](const std::vector<Sentence>& examples) { return static_cast<int64_t>(examples.size()); });
    int64_t samples = 0;
    for (const int64_t taken : own) samples += taken;
    EXPECT_EQ(samples, 8);
  }
}

TEST(ExampleLoader, WithoutAFunctionExamplesAreStacked) {
  struct Pairs {
    int64_t size() const { return 5; }
    std::pair<at::Tensor, int> get(int64_t index) const { return {at::full({2, 3}, index), static_cast<int>(index)}; }
  };
  ExampleLoader loader(Pairs(), Shard(1, 2), {.batch_size = 2});
  static_assert(std::same_as<decltype(loader), ExampleLoader<std::tuple<at::Tensor, at::Tensor>>>);
  static_assert(std::input_iterator<decltype(loader)::Iterator>);
  std::vector<at::Tensor> targets;
  for (auto& [data, target] : loader) {
    EXPECT_TRUE(data.equal(target.reshape({-1, 1, 1}).expand({-1, 2, 3}).to(data.scalar_type())));
    targets.push_back(target);
  }
  ASSERT_EQ(targets.size(), 2u);
  EXPECT_TRUE(targets[0].equal(at::tensor({1, 3}, at::kLong)) && targets[1].equal(at::tensor({0}, at::kLong)));
}

TEST(ExampleLoader, RandomExamplesDependOnSeedEpochAndIndexAlone) {
  struct Noisy {
    int64_t size() const { return 20; }
    std::pair<int64_t, double> get(int64_t index, uint64_t seed) const {
      return {index, transforms::Random(seed).uniform()};
    }
  };
  using Draws = std::map<std::pair<int, int64_t>, double>;
  const auto draws = [](int world_size, int64_t batch_size, int workers, uint64_t seed) {
    Draws all;
    for (int rank = 0; rank < world_size; ++rank) {
      ExampleLoader loader(Noisy(), Shard(rank, world_size, seed),
                           {.batch_size = batch_size, .shuffle = true, .workers = workers});
      for (const int epoch : loader.epochs(2))
        for (auto& [index, draw] : loader)
          for (int64_t i = 0; i < index.size(0); ++i)
            all[{epoch, index[i].template item<int64_t>()}] = draw[i].template item<double>();
    }
    EXPECT_EQ(all.size(), 40u);
    return all;
  };
  const Draws expected = draws(1, 4, 0, 5);
  EXPECT_EQ(draws(2, 3, 2, 5), expected);
  EXPECT_EQ(draws(3, 5, 1, 5), expected);
  EXPECT_NE(draws(1, 4, 0, 6), expected);
  EXPECT_NE(expected.at({0, 3}), expected.at({1, 3}));
  EXPECT_NE(expected.at({0, 3}), expected.at({0, 4}));
}

TEST(ExampleLoader, AnExceptionArrivesAtItsBatchAndTheLoaderStaysUsable) {
  for (const int workers : {0, 2}) {
    ExampleLoader loader(Sentences(), Shard(0, 1), {.batch_size = 4, .workers = workers},
                         [](std::vector<Sentence> examples) {
                           if (examples.front().at("ids")[0].item<int64_t>() == 12) throw std::out_of_range("unlucky");
                           return padded(std::move(examples));
                         });
    for (int round = 0; round < 2; ++round) {
      int batches = 0;
      EXPECT_THROW(
          {
            for ([[maybe_unused]] auto& batch : loader) ++batches;
          },
          std::out_of_range);
      EXPECT_EQ(batches, 3);
    }
  }
}

struct Shown {
  at::Tensor ids;
  void for_each_tensor(const std::function<void(at::Tensor&)>& visit) { visit(ids); }
};
struct Hidden {
  at::Tensor ids;
};

TEST(ExampleLoader, TheDeviceIsForTheTensorsItCanSee) {
  const auto hidden = [](std::vector<Sentence> examples) { return Hidden{examples.front().at("ids")}; };
  const auto shown = [](std::vector<Sentence> examples) { return Shown{examples.front().at("ids")}; };
  const DataLoaderOptions options{.device = at::kMeta};
  EXPECT_NE(complaint([&] {
              ExampleLoader(Sentences(), Shard(0, 1), options, hidden);
            }).find("which this type of batch does not list; give it a member for_each_tensor"),
            std::string::npos);
  ExampleLoader of_shown(Sentences(), Shard(0, 1), options, shown);
  for (auto& batch : of_shown) EXPECT_TRUE(batch.ids.is_meta());
  ExampleLoader of_maps(Sentences(), Shard(0, 1), options, padded);
  for (auto& batch : of_maps) EXPECT_TRUE(batch.at("ids").is_meta() && batch.at("mask").is_meta());
}

TEST(ExampleLoader, TheProgressLineCountsItsSamples) {
  ExampleLoader loader(Sentences(), Shard(0, 1), {.batch_size = 4}, padded);
  ::testing::internal::CaptureStderr();
  int64_t rows = 0;
  for (auto& batch : progress(loader)) rows += batch.at("ids").size(0);
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(rows, 23);
  EXPECT_NE(text.find("step 6/6"), std::string::npos) << text;
  auto iterator = loader.begin();
  EXPECT_EQ(iterator.samples(), 4);
}

TEST(DefaultCollate, NumbersThatFitIntoNoTensorAreNamed) {
  const auto most = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  EXPECT_EQ(default_collate(std::vector<uint64_t>{1, most})[1].item<int64_t>(), std::numeric_limits<int64_t>::max());
  EXPECT_NE(complaint([&] {
              default_collate(std::vector<uint64_t>{1, UINT64_MAX});
            }).find("18446744073709551615 does not fit"),
            std::string::npos);
  EXPECT_NE(complaint([&] { default_collate(std::vector<uint64_t>{most + 1}); }), "");
}

}  // namespace
}  // namespace lockstep
