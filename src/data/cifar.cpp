#include <ATen/ATen.h>

#include <lockstep/datasets.h>

#include <string>
#include <vector>

#include "data/cifar_file.h"
#include "data/own_bytes.h"
#include "data/pixel_values.h"

namespace lockstep::datasets {
namespace {

constexpr int64_t kChannelPixels = int64_t{32} * 32;
constexpr int64_t kPixels = 3 * kChannelPixels;

CifarLayout layout_of_10(Split split) {
  CifarLayout layout{.folder = "cifar-10-batches-bin",
                     .archive = "cifar-10-binary.tar.gz",
                     .members = {"test_batch.bin"},
                     .classes = {10},
                     .greatest_records = 10000,
                     .remedy = "Give CIFAR-10's binary version: the file cifar-10-binary.tar.gz, or its folder"};
  if (split == kTrain) {
    layout.members.clear();
    for (int i = 1; i <= 5; ++i) layout.members.push_back("data_batch_" + std::to_string(i) + ".bin");
  }
  return layout;
}

CifarLayout layout_of_100(Split split) {
  return {.folder = "cifar-100-binary",
          .archive = "cifar-100-binary.tar.gz",
          .members = {split == kTrain ? "train.bin" : "test.bin"},
          .classes = {20, 100},
          .greatest_records = 50000,
          .remedy = "Give CIFAR-100's binary version: the file cifar-100-binary.tar.gz, or its folder"};
}

}  // namespace

struct CIFAR::Content {
  CifarImages images;
  int64_t label_bytes;
  int64_t label;  // the index of the target label
  PixelValues values;
  bool as_bytes;
};

CIFAR::CIFAR(Content content) : as_bytes_(content.as_bytes) {
  const auto count = static_cast<int64_t>(content.images.pixels.size()) / kPixels;
  images_ = own_bytes(std::move(content.images.pixels), {count, 3, 32, 32});
  targets_ = own_bytes(std::move(content.images.labels), {count, content.label_bytes})
                 .select(1, content.label)
                 .to(at::kLong)
                 .contiguous();
  values_ = std::make_shared<const PixelValues>(std::move(content.values));
}

int64_t CIFAR::size() const { return targets_.size(0); }

Batch CIFAR::get(at::ArrayRef<int64_t> indices) const {
  const auto count = static_cast<int64_t>(indices.size());
  Batch batch{.data = at::empty({count, 3, 32, 32}, as_bytes_ ? at::kByte : at::kFloat),
              .target = at::empty({count}, at::kLong)};
  const uint8_t* images = images_.const_data_ptr<uint8_t>();
  const int64_t* targets = targets_.const_data_ptr<int64_t>();
  int64_t* target = batch.target.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_INDEX(indices[i] >= 0 && indices[i] < size(), "sample ", indices[i], " of a dataset of ", size());
    const uint8_t* image = images + indices[i] * kPixels;
    target[i] = targets[indices[i]];
    if (as_bytes_) {
      std::copy_n(image, kPixels, batch.data.mutable_data_ptr<uint8_t>() + i * kPixels);
      continue;
    }
    float* to = batch.data.mutable_data_ptr<float>() + i * kPixels;
    for (size_t channel = 0; channel < 3; ++channel, image += kChannelPixels, to += kChannelPixels)
      values_->convert(image, kChannelPixels, channel, to);
  }
  return batch;
}

CIFAR10::CIFAR10(const std::filesystem::path& path, Split split, CIFAROptions options)
    : CIFAR({.images = read_cifar(path, layout_of_10(split)),
             .label_bytes = 1,
             .label = 0,
             .values = PixelValues(kMean, kStandardDeviation),
             .as_bytes = options.as_bytes}) {}

CIFAR100::CIFAR100(const std::filesystem::path& path, Split split, CIFAR100Options options)
    : CIFAR({.images = read_cifar(path, layout_of_100(split)),
             .label_bytes = 2,
             .label = options.coarse ? 0 : 1,
             .values = PixelValues(kMean, kStandardDeviation),
             .as_bytes = options.as_bytes}) {}

}  // namespace lockstep::datasets
