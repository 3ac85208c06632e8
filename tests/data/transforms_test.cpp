#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <lockstep/data_loader.h>
#include <lockstep/datasets.h>
#include <lockstep/error.h>
#include <lockstep/image_folder.h>
#include <lockstep/transforms.h>

#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <thread>

#include "data/idx_writer.h"
#include "data/resize.h"
#include "data/tar_writer.h"

namespace lockstep {
namespace {

using namespace transforms;

std::vector<uint64_t> seeds(size_t count) {
  std::vector<uint64_t> all(count);
  for (size_t i = 0; i < count; ++i) all[i] = i * 77 + 1;
  return all;
}

at::Tensor pictures(int64_t count, int64_t height, int64_t width) {
  return at::arange(count * 3 * height * width).remainder(251).view({count, 3, height, width}).to(at::kByte);
}

TEST(Random, IsEvenAndFixed) {
  // The first numbers of Steele, Lea and Flood's generator from the seed 1234567, as published with it.
  Random fixed(1234567);
  for (const uint64_t expected : {6457827717110365317ULL, 3203168211198807973ULL, 9817491932198370423ULL})
    EXPECT_EQ(fixed.next(), expected);
  Random random(1);
  std::map<int64_t, int> seen;
  for (int i = 0; i < 9000; ++i) ++seen[random.below(9)];
  ASSERT_EQ(seen.size(), 9U);
  for (const auto& [value, times] : seen) EXPECT_NEAR(times, 1000, 150) << value;
  double sum = 0;
  for (int i = 0; i < 10000; ++i) sum += random.uniform();
  EXPECT_NEAR(sum / 10000, 0.5, 0.02);
  EXPECT_THROW(random.below(0), c10::Error);
}

TEST(Normalize, IsWhatOperatorsSay) {
  const at::Tensor bytes = pictures(2, 5, 4);
  const std::vector<float> mean{0.5f, 0.25f, 0.1f}, deviation{0.2f, 0.3f, 0.4f};
  const at::Tensor means = at::tensor(mean).view({1, 3, 1, 1}), deviations = at::tensor(deviation).view({1, 3, 1, 1});
  const at::Tensor unit = bytes.to(at::kFloat) / 255;
  const at::Tensor expected = (unit - means) / deviations;
  EXPECT_TRUE(at::equal(Normalize(mean, deviation)(bytes.clone(), seeds(2)), expected));
  EXPECT_TRUE(at::equal(Normalize(mean, deviation)(unit.clone(), seeds(2)), expected));
  EXPECT_TRUE(at::equal(Normalize({0.f}, {1.f})(bytes.clone(), seeds(2)), unit));
  EXPECT_THROW(Normalize({0.f, 1.f}, {1.f}), c10::Error);
  EXPECT_THROW(Normalize({0.f}, {0.f}), c10::Error);
  EXPECT_THROW(Normalize({0.f, 1.f}, {1.f, 1.f})(bytes, seeds(2)), c10::Error);
  EXPECT_THROW(Normalize(mean, deviation)(bytes.to(at::kLong), seeds(2)), c10::Error);
}

TEST(RandomCrop, IsAPartOfThePaddedImage) {
  const at::Tensor images = pictures(400, 6, 5);
  const at::Tensor padded = at::constant_pad_nd(images, {2, 2, 2, 2});
  for (const auto type : {at::kByte, at::kFloat}) {
    const at::Tensor parts = RandomCrop(4, 7, {.padding = 2})(images.to(type), seeds(400));
    ASSERT_EQ(parts.sizes(), (std::vector<int64_t>{400, 3, 4, 7}));
    std::map<std::pair<int64_t, int64_t>, int> places;
    for (int64_t i = 0; i < 400; ++i) {
      int matches = 0;
      for (int64_t top = 0; top <= 6; ++top)
        for (int64_t left = 0; left <= 2; ++left)
          if (at::equal(padded[i].slice(1, top, top + 4).slice(2, left, left + 7).to(type), parts[i])) {
            ++places[{top, left}];
            ++matches;
          }
      ASSERT_EQ(matches, 1) << "image " << i;
    }
    EXPECT_EQ(places.size(), 21U) << "some places are never drawn";
  }
  EXPECT_TRUE(at::equal(RandomCrop(6, 5)(images, seeds(400)), images));
  // Padding wider than the part: it may hold nothing of the image.
  EXPECT_EQ(RandomCrop(1, {.padding = 3})(images, seeds(400)).sizes(), (std::vector<int64_t>{400, 3, 1, 1}));
  EXPECT_THROW(RandomCrop(7, 5)(images, seeds(400)), c10::Error);
  EXPECT_THROW(RandomCrop(0), c10::Error);
}

TEST(RandomHorizontalFlip, FlipsAboutHalf) {
  const at::Tensor images = pictures(400, 4, 5);
  const at::Tensor turned = RandomHorizontalFlip()(images.clone(), seeds(400));
  int flipped = 0;
  for (int64_t i = 0; i < 400; ++i) {
    const bool is = at::equal(turned[i], images[i].flip(2));
    EXPECT_TRUE(is || at::equal(turned[i], images[i]));
    flipped += is;
  }
  EXPECT_NEAR(flipped, 200, 50);
  EXPECT_TRUE(at::equal(RandomHorizontalFlip(1)(images.to(at::kFloat), seeds(400)), images.to(at::kFloat).flip(3)));
  EXPECT_TRUE(at::equal(RandomHorizontalFlip(0)(images.clone(), seeds(400)), images));
  EXPECT_THROW(RandomHorizontalFlip(1.5), c10::Error);
}

// ---- resizing ----

TEST(Resize, IsAntialiasedBilinearAsPyTorchs) {
  at::manual_seed(1);
  for (const auto& [height, width, new_height, new_width] :
       {std::array{9, 7, 4, 3}, {9, 7, 20, 30}, {64, 48, 7, 50}, {1, 1, 5, 5}, {5, 5, 1, 1}, {8, 8, 8, 8}}) {
    const at::Tensor image = at::rand({1, 1, height, width}) * 255;
    const at::Tensor expected =
        at::_upsample_bilinear2d_aa(image, {new_height, new_width}, /*align_corners=*/false, {}, {});
    at::Tensor result = at::empty({new_height, new_width});
    resize(Plane<const float>{image.const_data_ptr<float>(), height, width, width},
           {0, 0, static_cast<double>(height), static_cast<double>(width)},
           Plane<float>{result.mutable_data_ptr<float>(), new_height, new_width, new_width});
    EXPECT_TRUE(at::allclose(result, expected[0][0], 1e-5, 1e-3)) << height << " x " << width;
  }
}

TEST(RandomResizedCrop, DrawsPartsOfTheAllowedShapes) {
  // Of a plane that rises by 1 a column, an enlarged part shows where it begins and how wide it is.
  const at::Tensor ramp = at::arange(60).to(at::kFloat).expand({300, 1, 40, 60}).contiguous();
  const at::Tensor parts = RandomResizedCrop(200, 300, {.scale = {0.2, 0.5}, .ratio = {0.5, 2}})(ramp, seeds(300));
  std::set<int64_t> lefts;
  for (int64_t i = 0; i < 300; ++i) {
    const double slope = (parts[i][0][100][200] - parts[i][0][100][100]).item<double>() / 100;
    const double width = slope * 300;  // columns of the part
    EXPECT_NEAR(width, std::round(width), 0.01);
    EXPECT_GE(width, std::sqrt(0.2 * 2400 * 0.5) - 1);
    EXPECT_LE(width, std::sqrt(0.5 * 2400 * 2) + 1);
    lefts.insert(std::llround((parts[i][0][100][100].item<double>() - 100.5 * slope + 0.5)));
  }
  EXPECT_GT(lefts.size(), 10U);
  // Where no shape fits, the middle.
  const at::Tensor thin = at::arange(100).to(at::kByte).view({1, 1, 1, 100});
  const at::Tensor middle = RandomResizedCrop(1, 1, {.scale = {1, 1}, .ratio = {1, 1}})(thin, seeds(1));
  EXPECT_EQ(middle.item<int64_t>(), 49);
  EXPECT_THROW(RandomResizedCrop(8, 8, {.scale = {0.5, 0.2}}), c10::Error);
}

// ---- chains ----

/// Sample i is an image of 1 x 8 x 8 that differs from every other.
class Pictures : public Dataset {
 public:
  int64_t size() const override { return 96; }
  Batch get(at::ArrayRef<int64_t> indices) const override {
    const at::Tensor numbers = at::tensor(indices, at::kLong);
    const at::Tensor places = at::arange(64).view({1, 1, 8, 8});
    return {.data = (places + numbers.view({-1, 1, 1, 1})).to(at::kByte), .target = numbers};
  }
};

Transformed augmented() {
  return Transformed(Transformed(Pictures(), {RandomCrop(8, {.padding = 3})}),
                     {RandomHorizontalFlip(), RandomResizedCrop(8), Normalize({0.5f}, {0.5f})});
}

/// Every sample of the rest of an epoch, by its number, as this rank sees it.
using Seen = std::map<int64_t, at::Tensor>;
void look(DataLoader& loader, Seen& seen, int64_t batches = 1000) {
  for (auto& [data, target] : loader) {
    for (int64_t i = 0; i < target.size(0); ++i) {
      const auto [at, is_new] = seen.emplace(target[i].item<int64_t>(), data[i].clone());
      EXPECT_TRUE(is_new) << "sample " << at->first << " twice";
    }
    if (--batches == 0) break;
  }
}

Seen epoch_on(int world_size, int epoch, DataLoaderOptions options) {
  Seen seen;
  for (int rank = 0; rank < world_size; ++rank) {
    DataLoader loader(augmented(), Shard(rank, world_size, 7), options);
    loader.set_epoch(epoch);
    look(loader, seen);
  }
  return seen;
}

void expect_same(const Seen& one, const Seen& other) {
  ASSERT_EQ(one.size(), other.size());
  for (const auto& [sample, image] : one) EXPECT_TRUE(at::equal(image, other.at(sample))) << sample;
}

int differences(const Seen& one, const Seen& other) {
  int count = 0;
  for (const auto& [sample, image] : one) count += !at::equal(image, other.at(sample));
  return count;
}

TEST(Transformed, IsTheSameOnAnyRanksWorkersAndBatches) {
  const Seen expected = epoch_on(1, 2, {.batch_size = 96, .workers = 0});
  for (const int world_size : {1, 2, 3, 4})
    for (const int workers : {0, 1, 3})
      expect_same(expected, epoch_on(world_size, 2, {.batch_size = 5, .shuffle = true, .workers = workers}));
  EXPECT_GT(differences(expected, epoch_on(1, 3, {.batch_size = 96})), 90) << "epochs must differ";
  EXPECT_GT(differences(expected, epoch_on(1, 2, {.batch_size = 96, .seed = 8})), 90) << "seeds must differ";
}

TEST(Transformed, AnEpochThatGoesOnIsAugmentedAsIfItHadNotStopped) {
  const Seen expected = epoch_on(1, 1, {.batch_size = 96, .shuffle = true});
  for (const int world_size : {1, 2, 4}) {
    Seen seen;
    c10::IValue state;
    for (int rank = 0; rank < 3; ++rank) {  // 3 ranks stop in the second epoch, after 5 steps of 4 samples
      DataLoader loader(augmented(), Shard(rank, 3, 7), {.batch_size = 4, .shuffle = true});
      loader.set_epoch(1);
      auto pass = loader.begin();
      for (int step = 0; step < 5; ++step, ++pass)
        for (int64_t i = 0; i < (*pass).target.size(0); ++i)
          EXPECT_TRUE(seen.emplace((*pass).target[i].item<int64_t>(), (*pass).data[i].clone()).second);
      // The batch at hand counts as done, so the state is that of the last step.
      if (rank == 0) {
        DataLoader again(augmented(), Shard(0, 3, 7), {.batch_size = 4, .shuffle = true});
        again.set_epoch(1);
        int step = 0;
        for ([[maybe_unused]] auto& batch : again)
          if (++step == 5) {
            state = again.state_dict();
            break;
          }
      }
    }
    EXPECT_EQ(seen.size(), 60U);
    for (int rank = 0; rank < world_size; ++rank) {
      DataLoader loader(augmented(), Shard(rank, world_size, 7), {.batch_size = 3, .shuffle = true});
      loader.load_state_dict(state);
      EXPECT_EQ(loader.first_step(), (60 + 3 * world_size - 1) / (3 * world_size));
      look(loader, seen);
    }
    expect_same(expected, seen);
  }
}

TEST(Transformed, ChainsDrawApartAndTakeFunctions) {
  // Twice the same transform, in one chain or in two: the draws are not the same ones.
  const auto flips = [](const Dataset& data) {
    std::vector<int64_t> all(96);
    for (int64_t i = 0; i < 96; ++i) all[i] = i;
    return data.get(all).data;
  };
  const at::Tensor plain = flips(Pictures());
  const at::Tensor in_one = flips(Transformed(Pictures(), {RandomHorizontalFlip(), RandomHorizontalFlip()}));
  const at::Tensor in_two =
      flips(Transformed(Transformed(Pictures(), {RandomHorizontalFlip()}), {RandomHorizontalFlip()}));
  EXPECT_TRUE(at::equal(in_one, in_two));
  EXPECT_FALSE(at::equal(in_one, plain));

  const Transformed own(Pictures(),
                        {[](at::Tensor images, at::ArrayRef<uint64_t>) { return images.to(at::kFloat) * 2; }});
  EXPECT_TRUE(at::equal(own.get({3}).data, Pictures().get({3}).data.to(at::kFloat) * 2));
  const Transformed broken(Pictures(), {[](at::Tensor images, at::ArrayRef<uint64_t>) { return images[0]; }});
  EXPECT_THROW(broken.get({3, 4}), c10::Error);
  EXPECT_THROW(Transformed(Pictures(), {Transform()}), c10::Error);
}

TEST(LoaderStats, TellReadingFromTransformsAndWaiting) {
  struct Slow : Pictures {
    Batch get(at::ArrayRef<int64_t> indices) const override {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      return Pictures::get(indices);
    }
  };
  const auto slower = [](at::Tensor images, at::ArrayRef<uint64_t>) {
    std::this_thread::sleep_for(std::chrono::milliseconds(15));
    return images;
  };
  for (const int workers : {0, 1, 2}) {
    DataLoader loader(Transformed(Slow(), {slower}), Shard(0, 1), {.batch_size = 12, .workers = workers});
    EXPECT_EQ(loader.stats().batches, 0);
    for ([[maybe_unused]] auto& batch : loader) {
    }
    const LoaderStats stats = loader.stats();
    EXPECT_EQ(stats.batches, 8);
    EXPECT_EQ(stats.workers, workers);
    EXPECT_GE(stats.reading_seconds, 8 * 0.005);
    EXPECT_GE(stats.transform_seconds, 8 * 0.015);
    EXPECT_GT(stats.transform_seconds, stats.reading_seconds);
    EXPECT_GT(stats.waiting_seconds, 0.5 * stats.seconds) << "the loop did nothing but wait";
    EXPECT_LE(stats.waiting_seconds, stats.seconds);
    EXPECT_NE(stats.advice().find("most of the loader's time is transforms"), std::string::npos) << stats.advice();
  }
}

TEST(DataLoader, WantsCudaForPinnedMemory) {
  if (at::hasCUDA()) GTEST_SKIP() << "SKIPPED BECAUSE this machine has CUDA";
  const auto text = [](DataLoaderOptions options) {
    return failure_of<c10::Error>([&] { DataLoader(Pictures(), Shard(0, 1), options); });
  };
  EXPECT_NE(text({.pin_memory = true}).find("pin_memory needs CUDA"), std::string::npos);
  EXPECT_NE(text({.device = at::Device(at::kCUDA, 0)}).find("the device is cuda:0"), std::string::npos);
  EXPECT_EQ(text({.device = at::Device(at::kCPU)}), "");
}

// ---- CIFAR ----

TEST(CIFAR, BatchesAsTorchvisionMakesThem) {
  const TemporaryFolder folder;
  std::string record(1, '\x07');
  for (int i = 0; i < 3072; ++i) record += static_cast<char>(i % 256);
  folder.write("test_batch.bin", record + record);
  const datasets::CIFAR10 data(folder.path(), kTest);
  EXPECT_EQ(data.size(), 2);
  const Batch batch = data.get({1, 0, 1});
  EXPECT_TRUE(at::equal(batch.target, at::tensor({7, 7, 7}, at::kLong)));
  const at::Tensor bytes = at::arange(3072).remainder(256).to(at::kByte).view({1, 3, 32, 32});
  const at::Tensor mean = at::tensor({0.4914f, 0.4822f, 0.4465f}).view({1, 3, 1, 1});
  const at::Tensor deviation = at::tensor({0.2470f, 0.2435f, 0.2616f}).view({1, 3, 1, 1});
  EXPECT_TRUE(at::equal(batch.data, ((bytes.to(at::kFloat) / 255 - mean) / deviation).expand({3, 3, 32, 32})));
  EXPECT_TRUE(at::equal(data.images()[1], bytes[0]));
  EXPECT_TRUE(at::equal(datasets::CIFAR10(folder.path(), kTest, {.as_bytes = true}).get({0}).data, bytes));
  EXPECT_THROW(data.get({2}), c10::Error);

  folder.write("train.bin", std::string(1, '\x13') + std::string(1, '\x63') + record.substr(1));
  EXPECT_EQ(datasets::CIFAR100(folder.path(), kTrain).targets().item<int64_t>(), 99);
  EXPECT_EQ(datasets::CIFAR100(folder.path(), kTrain, {.coarse = true}).get({0}).target.item<int64_t>(), 19);
  folder.write("train.bin", std::string(1, '\x14') + std::string(1, '\x63') + record.substr(1));
  EXPECT_NE(failure_of<Error>([&] { datasets::CIFAR100(folder.path(), kTrain); }).find("label 20"), std::string::npos);
}

TEST(Normalize, DeviationsThatMakeNoNumbersAreRefused) {
  const float nan = std::nanf(""), infinite = std::numeric_limits<float>::infinity();
  for (const float wrong : {0.0f, nan, infinite}) {
    EXPECT_THROW(Normalize({0.5f}, {wrong}), c10::Error) << wrong;
    EXPECT_THROW(datasets::ImageFolder("nowhere", {.standard_deviation = {0.2f, wrong, 0.2f}}), c10::Error) << wrong;
  }
  for (const float wrong : {nan, infinite}) {
    EXPECT_THROW(Normalize({wrong}, {0.5f}), c10::Error) << wrong;
    EXPECT_THROW(datasets::ImageFolder("nowhere", {.mean = {0.2f, 0.2f, wrong}}), c10::Error) << wrong;
  }
}

}  // namespace
}  // namespace lockstep
