#include <lockstep/image_folder.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "data/file_content.h"
#include "data/image/image.h"
#include "data/image/image_listing.h"
#include "data/pixel_values.h"
#include "data/resize.h"

namespace lockstep::datasets {
namespace {

constexpr int64_t kGreatestFile = int64_t{256} << 20;

Box part_of(const Image& image, const ImageFolderOptions& options) {
  const auto height = static_cast<double>(image.height), width = static_cast<double>(image.width);
  if (options.stretch) return {0, 0, height, width};
  const double ratio = static_cast<double>(options.width) / static_cast<double>(options.height);
  const double part_width = std::min(width, height * ratio), part_height = std::min(height, width / ratio);
  return {(height - part_height) / 2, (width - part_width) / 2, part_height, part_width};
}

}  // namespace

struct ImageFolder::Content {
  std::filesystem::path root;
  ImageFolderOptions options;
  ImageListing listing;
  PixelValues values;

  const ImageListing::File& file(int64_t index) const {
    const auto count = static_cast<int64_t>(listing.files.size());
    TORCH_CHECK_INDEX(index >= 0 && index < count, "sample ", index, " of a dataset of ", count);
    return listing.files[static_cast<size_t>(index)];
  }

  /// The image as bytes [3, height, width].
  void read(int64_t index, uint8_t* to) const {
    const std::filesystem::path path = root / file(index).path;
    const std::vector<uint8_t> bytes = file_content::read_whole(path, kGreatestFile);
    const Image image = decode_image(path.string(), bytes.data(), bytes.size());
    const Box part = part_of(image, options);
    for (int64_t colour = 0; colour < 3; ++colour)
      resize(
          Plane<const uint8_t>{image.pixels.data() + colour, image.height, image.width, 3 * image.width, 3}, part,
          Plane<uint8_t>{to + colour * options.height * options.width, options.height, options.width, options.width});
  }
};

ImageFolder::ImageFolder(const std::filesystem::path& root, ImageFolderOptions options) {
  constexpr int64_t kGreatestSide = 1 << 14;
  TORCH_CHECK(
      options.height >= 1 && options.width >= 1 && options.height <= kGreatestSide && options.width <= kGreatestSide,
      "ImageFolder: images of ", options.height, " x ", options.width, ", expected sides of 1 to ", kGreatestSide);
  for (size_t channel = 0; channel < 3 && !options.as_bytes; ++channel) {
    const float mean = options.mean[channel], deviation = options.standard_deviation[channel];
    TORCH_CHECK(std::isfinite(mean) && std::isfinite(deviation) && deviation != 0, "ImageFolder: mean ", mean,
                " and standard_deviation ", deviation, " of channel ", channel,
                "; expected finite numbers, and a deviation other than 0");
  }
  content_ = std::make_shared<const Content>(Content{.root = root,
                                                     .options = options,
                                                     .listing = list_images(root),
                                                     .values = PixelValues(options.mean, options.standard_deviation)});
}

int64_t ImageFolder::size() const { return static_cast<int64_t>(content_->listing.files.size()); }
const std::vector<std::string>& ImageFolder::classes() const { return content_->listing.classes; }
std::filesystem::path ImageFolder::path(int64_t index) const { return content_->root / content_->file(index).path; }
int64_t ImageFolder::target(int64_t index) const { return content_->file(index).target; }

Batch ImageFolder::get(at::ArrayRef<int64_t> indices) const {
  const auto count = static_cast<int64_t>(indices.size());
  const auto& [height, width] = std::pair(content_->options.height, content_->options.width);
  const int64_t plane = height * width;
  const bool as_bytes = content_->options.as_bytes;
  Batch batch{.data = at::empty({count, 3, height, width}, as_bytes ? at::kByte : at::kFloat),
              .target = at::empty({count}, at::kLong)};
  std::vector<uint8_t> pixels(as_bytes ? 0 : static_cast<size_t>(3 * plane));
  for (int64_t i = 0; i < count; ++i) {
    batch.target.mutable_data_ptr<int64_t>()[i] = target(indices[i]);
    content_->read(indices[i], as_bytes ? batch.data.mutable_data_ptr<uint8_t>() + i * 3 * plane : pixels.data());
    if (as_bytes) continue;
    for (int64_t colour = 0; colour < 3; ++colour)
      content_->values.convert(pixels.data() + colour * plane, plane, static_cast<size_t>(colour),
                               batch.data.mutable_data_ptr<float>() + (i * 3 + colour) * plane);
  }
  return batch;
}

}  // namespace lockstep::datasets
