#include <lockstep/torch_data.h>

#include <gtest/gtest.h>

#include <optional>

#include <torch/torch.h>

#include <lockstep/data_loader.h>
#include <lockstep/datasets.h>

#include "data/idx_writer.h"
#include "support/complaint.h"

// Datasets of torch::data as those of a DataLoader. Both MNISTs read the same files.

namespace lockstep::torch_data_test {
namespace {

namespace data = torch::data;
using datasets::TorchData;

/// Sample i is i, i + 1; without a target.
class Pairs : public data::datasets::Dataset<Pairs, data::TensorExample> {
 public:
  data::TensorExample get(size_t index) override {
    return at::arange(static_cast<int64_t>(index), static_cast<int64_t>(index) + 2);
  }
  std::optional<size_t> size() const override { return 10; }
};

class Endless : public data::datasets::Dataset<Endless> {
 public:
  data::Example<> get(size_t) override { return {at::zeros({1}), at::zeros({1})}; }
  std::optional<size_t> size() const override { return std::nullopt; }
};

class TorchDataTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kImages = 10000;  // as many as LibTorch's MNIST asks of a test set

  static void SetUpTestSuite() {
    std::string pixels(kImages * 784, '\0'), labels(kImages, '\0');
    for (size_t i = 0; i < pixels.size(); ++i) pixels[i] = static_cast<char>((i * 7 + i / 784) % 256);
    for (size_t i = 0; i < labels.size(); ++i) labels[i] = static_cast<char>(i % 10);
    folder_ = new TemporaryFolder;
    folder_->write("t10k-images-idx3-ubyte", idx_header({kImages, 28, 28}) + pixels);
    folder_->write("t10k-labels-idx1-ubyte", idx_header({kImages}) + labels);
  }
  static void TearDownTestSuite() { delete folder_; }

  static auto torchs() {
    return data::datasets::MNIST(folder_->path().string(), data::datasets::MNIST::Mode::kTest)
        .map(data::transforms::Normalize<>(0.1307, 0.3081));
  }
  static inline TemporaryFolder* folder_ = nullptr;
};

std::vector<Batch> batches_of(DataLoader& loader) {
  std::vector<Batch> all;
  for (Batch& batch : loader) all.push_back(std::move(batch));
  return all;
}

template <typename Made, typename Expected>
void expect_equal(const Made& made, const Expected& expected) {
  for (const int workers : {0, 2})
    for (const int world : {1, 2, 3})
      for (int rank = 0; rank < world; ++rank) {
        const DataLoaderOptions options{.batch_size = 640, .shuffle = true, .workers = workers, .seed = 3};
        DataLoader ours(expected, Shard(rank, world), options), theirs(made, Shard(rank, world), options);
        ASSERT_EQ(ours.size(), theirs.size());
        for ([[maybe_unused]] const int epoch : {0, 1}) {
          const auto right = batches_of(ours), found = batches_of(theirs);
          ASSERT_EQ(found.size(), right.size());
          for (size_t i = 0; i < right.size(); ++i) {
            ASSERT_TRUE(at::allclose(found[i].data, right[i].data, 1e-5, 1e-6));
            ASSERT_TRUE(at::equal(found[i].target, right[i].target));
          }
        }
      }
}

TEST_F(TorchDataTest, MappedExamplesAreThoseOfTheLibrarysOwnDataset) {
  expect_equal(TorchData(torchs()), datasets::MNIST(folder_->path(), kTest));
}

TEST_F(TorchDataTest, StackedBatchesAreTakenAsTheyAre) {
  expect_equal(TorchData(torchs().map(data::transforms::Stack<>())), datasets::MNIST(folder_->path(), kTest));
}

TEST(TorchDataOfTensors, HasBatchesWithoutATarget) {
  for (const bool stacked : {false, true})
    for (const int workers : {0, 2}) {
      const DataLoaderOptions options{.batch_size = 2, .workers = workers};
      const auto check = [&](DataLoader loader) {
        std::vector<int64_t> first;
        for (const Batch& batch : loader) {
          EXPECT_FALSE(batch.target.defined());
          for (int64_t row = 0; row < batch.data.size(0); ++row) {
            first.push_back(batch.data[row][0].item<int64_t>());
            EXPECT_EQ(batch.data[row][1].item<int64_t>(), first.back() + 1);
          }
        }
        EXPECT_EQ(first, (std::vector<int64_t>{1, 4, 7, 0}));  // ten do not divide by three: rank 1 repeats one
      };
      if (stacked)
        check(DataLoader(TorchData(Pairs().map(data::transforms::Stack<data::TensorExample>())), Shard(1, 3), options));
      else
        check(DataLoader(TorchData(Pairs()), Shard(1, 3), options));
    }
}

/// Sample 3 has no data, or sample 2 no target.
class Gaps : public data::datasets::Dataset<Gaps> {
 public:
  explicit Gaps(bool of_data) : of_data_(of_data) {}
  data::Example<> get(size_t index) override {
    return {of_data_ && index == 3 ? at::Tensor() : at::ones({2}),
            !of_data_ && index == 2 ? at::Tensor() : at::ones({1})};
  }
  std::optional<size_t> size() const override { return 4; }

 private:
  bool of_data_;
};

TEST(TorchDataWithGaps, NamesTheSample) {
  const auto said = [](bool of_data) {
    DataLoader loader(TorchData{Gaps(of_data)}, Shard(0, 1), {.batch_size = 4});
    return testing::complaint([&] {
      for (const Batch& batch : loader) static_cast<void>(batch);
    });
  };
  EXPECT_EQ(said(true), "TorchData: the `data` of sample 3 is an undefined tensor");
  EXPECT_EQ(said(false),
            "TorchData: of the samples 0 and 2, one has a `target` and the other one an undefined tensor; give all "
            "samples a target, or none");
}

/// Sample i has i elements of data, or of its target.
class Ragged : public data::datasets::Dataset<Ragged> {
 public:
  explicit Ragged(bool of_data) : of_data_(of_data) {}
  data::Example<> get(size_t index) override {
    const auto elements = static_cast<int64_t>(index);
    return {at::ones({of_data_ ? elements : 2}), at::ones({of_data_ ? 1 : elements, 3})};
  }
  std::optional<size_t> size() const override { return 4; }

 private:
  bool of_data_;
};

TEST(TorchDataOfSeveralShapes, NamesTheSamples) {
  const auto said = [](bool of_data) {
    DataLoader loader(TorchData{Ragged(of_data)}, Shard(1, 2), {.batch_size = 2});
    return testing::complaint([&] {
      for (const Batch& batch : loader) static_cast<void>(batch);
    });
  };
  const std::string mend =
      ", so they cannot form a batch; give all samples the same shape, or use an ExampleLoader with a function that "
      "pads";
  EXPECT_EQ(said(true), "TorchData: the `data` of sample 1 has the shape [1], and that of sample 3 has [3]" + mend);
  EXPECT_EQ(said(false),
            "TorchData: the `target` of sample 1 has the shape [1, 3], and that of sample 3 has [3, 3]" + mend);
}

TEST(TorchDataOfUnknownSize, IsRefused) {
  std::string said;
  try {
    TorchData{Endless()};
  } catch (const c10::Error& error) {
    said = error.what_without_backtrace();
  }
  EXPECT_EQ(said, "TorchData: the dataset does not know its size");
}

}  // namespace
}  // namespace lockstep::torch_data_test
