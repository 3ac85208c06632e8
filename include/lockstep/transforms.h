#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <lockstep/dataset.h>

namespace lockstep {

class PixelValues;

namespace transforms {

/// Changes a batch of images: [n, channels, height, width], uint8 or float32, contiguous, on the CPU, which it may
/// modify. `seeds[i]` belongs to image i and depends only on the loader's seed, the epoch, the sample's index and the
/// transform's place in its chain. So numbers drawn from it are the same on any number of ranks and workers, in any
/// batch, and after a resume. Several workers call a transform at once. Any function or lambda works.
using Transform = std::function<at::Tensor(at::Tensor images, at::ArrayRef<uint64_t> seeds)>;

/// Random numbers from a seed, the same on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next();
  /// 0 .. limit - 1, all equally likely.
  int64_t below(int64_t limit);
  /// 0 <= u < 1.
  double uniform();

 private:
  uint64_t state_;
};

/// (x - mean) / standard deviation of each channel, in float32, like torchvision's ToTensor and Normalize; bytes are
/// scaled to 0 .. 1 first. A single number applies to all channels. Normalize({0}, {1}) only converts bytes to floats.
class Normalize {
 public:
  /// Throws c10::Error unless there are as many standard deviations as means, none of them 0.
  Normalize(at::ArrayRef<float> mean, at::ArrayRef<float> standard_deviation);
  at::Tensor operator()(const at::Tensor& images, at::ArrayRef<uint64_t> seeds) const;

 private:
  std::vector<float> mean_, standard_deviation_;
  std::shared_ptr<const PixelValues> values_;
};

struct RandomCropOptions {
  /// Rows and columns of zeros added around the image first.
  int64_t padding = 0;
};

/// A random part of `height` x `width`; every position is equally likely.
class RandomCrop {
 public:
  RandomCrop(int64_t height, int64_t width, RandomCropOptions options = {});
  explicit RandomCrop(int64_t size, RandomCropOptions options = {}) : RandomCrop(size, size, options) {}
  at::Tensor operator()(const at::Tensor& images, at::ArrayRef<uint64_t> seeds) const;

 private:
  int64_t height_, width_, padding_;
};

/// Mirrors left to right with this probability.
class RandomHorizontalFlip {
 public:
  explicit RandomHorizontalFlip(double probability = 0.5);
  at::Tensor operator()(at::Tensor images, at::ArrayRef<uint64_t> seeds) const;

 private:
  double probability_;
};

struct RandomResizedCropOptions {
  /// Smallest and largest share of the image's area, and ratio of width to height.
  std::array<double, 2> scale{0.08, 1.0};
  std::array<double, 2> ratio{3.0 / 4, 4.0 / 3};
};

/// A part of random area and shape, drawn as in torchvision and resized to `height` x `width` by a triangle filter that
/// widens when shrinking (antialiased bilinear).
class RandomResizedCrop {
 public:
  RandomResizedCrop(int64_t height, int64_t width, RandomResizedCropOptions options = {});
  explicit RandomResizedCrop(int64_t size, RandomResizedCropOptions options = {})
      : RandomResizedCrop(size, size, options) {}
  at::Tensor operator()(const at::Tensor& images, at::ArrayRef<uint64_t> seeds) const;

 private:
  int64_t height_, width_;
  RandomResizedCropOptions options_;
};

}  // namespace transforms

/// A dataset whose images go through transforms, one after another:
///
///     using namespace lockstep::transforms;
///     using lockstep::datasets::CIFAR10;
///     lockstep::DataLoader train(
///         lockstep::Transformed(CIFAR10(path, lockstep::kTrain, {.as_bytes = true}),
///                               {RandomCrop(32, {.padding = 4}), RandomHorizontalFlip(),
///                                Normalize(CIFAR10::kMean, CIFAR10::kStandardDeviation)}),
///         context, {.batch_size = 128, .shuffle = true, .workers = 2});
///
/// Every epoch of a DataLoader draws new random numbers. Bytes are cheaper to crop and flip than floats: put Normalize
/// last.
class Transformed : public Dataset {
 public:
  template <std::derived_from<Dataset> D>
  Transformed(D dataset, std::vector<transforms::Transform> chain)
      : Transformed(std::shared_ptr<const Dataset>(std::make_shared<const D>(std::move(dataset))), std::move(chain)) {}
  Transformed(std::shared_ptr<const Dataset> dataset, std::vector<transforms::Transform> chain);

  int64_t size() const override { return dataset_->size(); }
  /// As in epoch 0 with seed 0.
  Batch get(at::ArrayRef<int64_t> indices) const override;
  Batch draw(at::ArrayRef<int64_t> indices, Draw& draw) const override;

 private:
  std::shared_ptr<const Dataset> dataset_;
  std::vector<transforms::Transform> chain_;
};

}  // namespace lockstep
