// Transforms on images, as plain loops: a worker has one thread, so operators on whole tensors would gain nothing and
// each make a temporary.

#include <lockstep/transforms.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/clock.h"
#include "data/pixel_values.h"
#include "data/random.h"
#include "data/resize.h"

namespace lockstep {
namespace transforms {
namespace {

void check_images(const char* transform, const at::Tensor& images, at::ArrayRef<uint64_t> seeds) {
  TORCH_CHECK(images.dim() == 4 && images.device().is_cpu() && images.is_contiguous() &&
                  (images.scalar_type() == at::kByte || images.scalar_type() == at::kFloat),
              transform,
              ": expected images [n, channels, height, width], uint8 or float32, contiguous, on the CPU; found ",
              images.sizes(), " of ", images.scalar_type(), " on ", images.device());
  TORCH_CHECK(images.size(0) == static_cast<int64_t>(seeds.size()), transform, ": ", images.size(0), " images and ",
              seeds.size(), " seeds");
}

/// The beginning of the cropped part, in the image without its padding; may be negative.
struct Corner {
  int64_t top, left;
};

/// Copies `height` x `width` values of `bytes` bytes from a plane; values outside it are 0.
void cut(const char* from, int64_t rows, int64_t columns, Corner corner, int64_t height, int64_t width, int64_t bytes,
         char* to) {
  const int64_t left = std::clamp<int64_t>(-corner.left, 0, width);  // columns of the part to the left of the plane
  const int64_t inside = std::clamp<int64_t>(columns - corner.left, left, width);
  for (int64_t y = 0; y < height; ++y, to += width * bytes) {
    const int64_t row = corner.top + y;
    if (row < 0 || row >= rows) {
      std::memset(to, 0, width * bytes);
      continue;
    }
    std::memset(to, 0, left * bytes);
    if (inside > left)
      std::memcpy(to + left * bytes, from + (row * columns + corner.left + left) * bytes, (inside - left) * bytes);
    std::memset(to + inside * bytes, 0, (width - inside) * bytes);
  }
}

}  // namespace

// ---- Random ----

uint64_t Random::next() { return scramble(state_ += kGoldenStep); }

int64_t Random::below(int64_t limit) {
  TORCH_CHECK(limit > 0, "Random::below(", limit, "): expected at least 1");
  // As in permutation.h: low words that would favour some numbers are redrawn.
  using Product = unsigned __int128;
  const auto range = static_cast<uint64_t>(limit);
  Product product = Product{next()} * range;
  while (static_cast<uint64_t>(product) < (0 - range) % range) product = Product{next()} * range;
  return static_cast<int64_t>(product >> 64);
}

double Random::uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

// ---- Normalize ----

Normalize::Normalize(at::ArrayRef<float> mean, at::ArrayRef<float> standard_deviation)
    : mean_(mean.vec()), standard_deviation_(standard_deviation.vec()) {
  TORCH_CHECK(!mean.empty() && mean.size() == standard_deviation.size(), "Normalize: ", mean.size(), " means and ",
              standard_deviation.size(), " standard deviations; give one of each, or one per channel");
  for (const float each : standard_deviation)
    TORCH_CHECK(std::isfinite(each) && each != 0, "Normalize: a standard deviation is ", each);
  for (const float each : mean) TORCH_CHECK(std::isfinite(each), "Normalize: a mean is ", each);
  values_ = std::make_shared<const PixelValues>(mean, standard_deviation);
}

at::Tensor Normalize::operator()(const at::Tensor& images, at::ArrayRef<uint64_t> seeds) const {
  check_images("Normalize", images, seeds);
  const int64_t channels = images.size(1), pixels = images.size(2) * images.size(3);
  TORCH_CHECK(mean_.size() == 1 || channels == static_cast<int64_t>(mean_.size()), "Normalize: ", mean_.size(),
              " means for images of ", channels, " channels");
  const bool bytes = images.scalar_type() == at::kByte;
  at::Tensor result = bytes ? at::empty(images.sizes(), at::kFloat) : images;
  float* to = result.mutable_data_ptr<float>();
  for (int64_t plane = 0; plane < images.size(0) * channels; ++plane, to += pixels) {
    const size_t channel = mean_.size() == 1 ? 0 : static_cast<size_t>(plane % channels);
    if (bytes) {
      values_->convert(images.const_data_ptr<uint8_t>() + plane * pixels, pixels, channel, to);
      continue;
    }
    const float mean = mean_[channel], standard_deviation = standard_deviation_[channel];
    for (int64_t i = 0; i < pixels; ++i) to[i] = (to[i] - mean) / standard_deviation;
  }
  return result;
}

// ---- RandomCrop ----

RandomCrop::RandomCrop(int64_t height, int64_t width, RandomCropOptions options)
    : height_(height), width_(width), padding_(options.padding) {
  TORCH_CHECK(height > 0 && width > 0 && padding_ >= 0, "RandomCrop: ", height, " x ", width, " with a padding of ",
              padding_, "; expected sizes above 0 and a padding of at least 0");
}

at::Tensor RandomCrop::operator()(const at::Tensor& images, at::ArrayRef<uint64_t> seeds) const {
  check_images("RandomCrop", images, seeds);
  const int64_t channels = images.size(1), rows = images.size(2), columns = images.size(3);
  const int64_t down = rows + 2 * padding_ - height_, right = columns + 2 * padding_ - width_;
  TORCH_CHECK(down >= 0 && right >= 0, "RandomCrop: a part of ", height_, " x ", width_, " of images of ", rows, " x ",
              columns, " with a padding of ", padding_, "; use a smaller part or more padding");
  at::Tensor result = at::empty({images.size(0), channels, height_, width_}, images.options());
  const auto bytes = static_cast<int64_t>(images.element_size());
  const char* from = static_cast<const char*>(images.const_data_ptr());
  char* to = static_cast<char*>(result.mutable_data_ptr());
  for (const uint64_t seed : seeds) {
    Random random(seed);
    const int64_t top = random.below(down + 1) - padding_, left = random.below(right + 1) - padding_;
    for (int64_t channel = 0; channel < channels; ++channel) {
      cut(from, rows, columns, {top, left}, height_, width_, bytes, to);
      from += rows * columns * bytes;
      to += height_ * width_ * bytes;
    }
  }
  return result;
}

// ---- RandomHorizontalFlip ----

RandomHorizontalFlip::RandomHorizontalFlip(double probability) : probability_(probability) {
  TORCH_CHECK(probability >= 0 && probability <= 1, "RandomHorizontalFlip: the probability is ", probability,
              ", expected 0 to 1");
}

at::Tensor RandomHorizontalFlip::operator()(at::Tensor images, at::ArrayRef<uint64_t> seeds) const {
  check_images("RandomHorizontalFlip", images, seeds);
  const int64_t rows = images.size(1) * images.size(2), columns = images.size(3);
  const auto flip = [&](auto* values) {
    for (size_t i = 0; i < seeds.size(); ++i, values += rows * columns) {
      if (Random(seeds[i]).uniform() >= probability_) continue;
      for (int64_t row = 0; row < rows; ++row) std::reverse(values + row * columns, values + (row + 1) * columns);
    }
  };
  if (images.scalar_type() == at::kByte)
    flip(images.mutable_data_ptr<uint8_t>());
  else
    flip(images.mutable_data_ptr<float>());
  return images;
}

// ---- RandomResizedCrop ----

namespace {

/// The draws of torchvision's RandomResizedCrop.get_params: ten tries, then the middle in the nearest allowed shape.
Box draw_box(Random random, int64_t rows, int64_t columns, const RandomResizedCropOptions& options) {
  const double area = static_cast<double>(rows * columns);
  const double least = std::log(options.ratio[0]), greatest = std::log(options.ratio[1]);
  for (int i = 0; i < 10; ++i) {
    const double part = area * (options.scale[0] + random.uniform() * (options.scale[1] - options.scale[0]));
    const double ratio = std::exp(least + random.uniform() * (greatest - least));
    const int64_t width = std::llrint(std::sqrt(part * ratio)), height = std::llrint(std::sqrt(part / ratio));
    if (width < 1 || width > columns || height < 1 || height > rows) continue;
    const int64_t top = random.below(rows - height + 1), left = random.below(columns - width + 1);
    return {static_cast<double>(top), static_cast<double>(left), static_cast<double>(height),
            static_cast<double>(width)};
  }
  const double ratio = static_cast<double>(columns) / static_cast<double>(rows);
  double height = static_cast<double>(rows), width = static_cast<double>(columns);
  if (ratio < options.ratio[0]) height = std::clamp(std::rint(width / options.ratio[0]), 1.0, height);
  if (ratio > options.ratio[1]) width = std::clamp(std::rint(height * options.ratio[1]), 1.0, width);
  return {std::floor((static_cast<double>(rows) - height) / 2), std::floor((static_cast<double>(columns) - width) / 2),
          height, width};
}

}  // namespace

RandomResizedCrop::RandomResizedCrop(int64_t height, int64_t width, RandomResizedCropOptions options)
    : height_(height), width_(width), options_(options) {
  const auto& [scale, ratio] = options;
  TORCH_CHECK(height > 0 && width > 0, "RandomResizedCrop: ", height, " x ", width, "; expected sizes above 0");
  TORCH_CHECK(scale[0] > 0 && scale[0] <= scale[1] && scale[1] <= 1 && ratio[0] > 0 && ratio[0] <= ratio[1],
              "RandomResizedCrop: scale ", scale[0], " to ", scale[1], ", ratio ", ratio[0], " to ", ratio[1],
              "; expected 0 < least <= greatest, and a scale of at most 1");
}

at::Tensor RandomResizedCrop::operator()(const at::Tensor& images, at::ArrayRef<uint64_t> seeds) const {
  check_images("RandomResizedCrop", images, seeds);
  const int64_t channels = images.size(1), rows = images.size(2), columns = images.size(3);
  TORCH_CHECK(rows > 0 && columns > 0, "RandomResizedCrop: images of ", rows, " x ", columns);
  at::Tensor result = at::empty({images.size(0), channels, height_, width_}, images.options());
  const auto resize_all = [&]<typename T>(const T* from, T* to) {
    for (const uint64_t seed : seeds) {
      const Box box = draw_box(Random(seed), rows, columns, options_);
      for (int64_t channel = 0; channel < channels; ++channel, from += rows * columns, to += height_ * width_)
        resize(Plane<const T>{from, rows, columns, columns}, box, Plane<T>{to, height_, width_, width_});
    }
  };
  if (images.scalar_type() == at::kByte)
    resize_all(images.const_data_ptr<uint8_t>(), result.mutable_data_ptr<uint8_t>());
  else
    resize_all(images.const_data_ptr<float>(), result.mutable_data_ptr<float>());
  return result;
}

}  // namespace transforms

// ---- Transformed ----

Transformed::Transformed(std::shared_ptr<const Dataset> dataset, std::vector<transforms::Transform> chain)
    : dataset_(std::move(dataset)), chain_(std::move(chain)) {
  TORCH_CHECK(dataset_ != nullptr, "Transformed: the dataset is null");
  for (const auto& transform : chain_) TORCH_CHECK(transform != nullptr, "Transformed: a transform is empty");
}

Batch Transformed::get(at::ArrayRef<int64_t> indices) const {
  Draw first;
  return draw(indices, first);
}

Batch Transformed::draw(at::ArrayRef<int64_t> indices, Draw& draw) const {
  Batch batch = dataset_->draw(indices, draw);
  TORCH_CHECK(batch.data.defined() || indices.empty(), "Transformed: the dataset was asked for ", indices.size(),
              " samples, the first of which is sample ", indices[0],
              ", but the `data` that it returned is an undefined tensor");
  const auto start = Clock::now();
  std::vector<uint64_t> seeds(indices.size());
  for (size_t place = 0; place < chain_.size(); ++place) {
    for (size_t i = 0; i < indices.size(); ++i)
      seeds[i] = sample_seed(draw.seed, draw.epoch, indices[i], draw.transforms);
    batch.data = chain_[place](std::move(batch.data), seeds);
    TORCH_CHECK(
        batch.data.defined() && batch.data.dim() > 0 && batch.data.size(0) == static_cast<int64_t>(indices.size()),
        "Transformed: transform ", place, " did not return a batch of ", indices.size(), " images");
    ++draw.transforms;
  }
  draw.transform_seconds += seconds_since(start);
  return batch;
}

}  // namespace lockstep
