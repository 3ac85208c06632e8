#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/dataset.h>

namespace lockstep::datasets {

struct ImageFolderOptions {
  /// What every image is resized to.
  int64_t height = 224;
  int64_t width = 224;
  /// Take the whole image, whatever its shape; else the largest part of the wanted shape, from the middle.
  bool stretch = false;
  /// Leave pixels as bytes, uint8, for transforms (transforms.h); else they are float32, (pixel / 255 - mean) /
  /// standard_deviation. These are ImageNet's.
  bool as_bytes = false;
  std::array<float, 3> mean{0.485f, 0.456f, 0.406f};
  std::array<float, 3> standard_deviation{0.229f, 0.224f, 0.225f};
};

/// JPEG and PNG files, in a folder for each class, in any depth: root/dog/xxx.png, root/cat/yyy/zzz.jpg. Classes are
/// the folders below root in the order of their names' bytes, files within a class likewise: torchvision's order.
///
/// Batches are `data` [n, 3, height, width], red, green and blue, and `target` int64 [n]. Greys become colours;
/// transparency and the camera's orientation are ignored, 16 bits cut to 8, as PIL does. Resized by a triangle filter
/// that widens when it shrinks (antialiased bilinear). Each image is read when it is asked for.
class ImageFolder : public Dataset {
 public:
  /// Lists the files, and opens none. Throws Error naming the folder or file for a class without images, a link that
  /// goes round, and images of a kind that is not read here.
  explicit ImageFolder(const std::filesystem::path& root, ImageFolderOptions options = {});

  int64_t size() const override;
  /// Throws Error naming the file for one that is missing, truncated, corrupt, neither JPEG nor PNG, or larger than 64
  /// megapixels or 256 MiB; memory is taken after that has been checked. c10::Error for an index out of range.
  Batch get(at::ArrayRef<int64_t> indices) const override;

  /// Names, in the order of their numbers.
  const std::vector<std::string>& classes() const;
  std::filesystem::path path(int64_t index) const;
  int64_t target(int64_t index) const;

 private:
  struct Content;
  std::shared_ptr<const Content> content_;
};

}  // namespace lockstep::datasets
