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
  /// The size to which every image is resized.
  int64_t height = 224;
  int64_t width = 224;
  /// Resize the whole image, whatever its shape. Otherwise take the largest centred part of the wanted shape.
  bool stretch = false;
  /// Leave pixels as bytes, uint8, for transforms (transforms.h). Otherwise they are float32, (pixel / 255 - mean) /
  /// standard_deviation. The defaults are ImageNet's.
  bool as_bytes = false;
  std::array<float, 3> mean{0.485f, 0.456f, 0.406f};
  std::array<float, 3> standard_deviation{0.229f, 0.224f, 0.225f};
};

/// JPEG and PNG files, with a folder for each class, at any depth: root/dog/xxx.png, root/cat/yyy/zzz.jpg. The folders
/// in root are the classes. Classes, and the files within a class, are sorted by the bytes of their names, in
/// torchvision's order.
///
/// Batches are `data` [n, 3, height, width] (red, green, blue) and `target` int64 [n]. As in PIL, grey images become
/// RGB, transparency and the camera's orientation are ignored, and 16 bits are cut to 8. Images are resized by a
/// triangle filter that widens when shrinking (antialiased bilinear). Each image is read when needed.
class ImageFolder : public Dataset {
 public:
  /// Lists the files without opening them. Throws Error, naming the folder or file, for a class without images, a
  /// cyclic link, or images of an unsupported kind.
  explicit ImageFolder(const std::filesystem::path& root, ImageFolderOptions options = {});

  int64_t size() const override;
  /// Throws Error, naming the file, if it is missing, truncated, corrupt, neither JPEG nor PNG, or larger than 64
  /// megapixels or 256 MiB; sizes are checked before memory is allocated. Throws c10::Error for an index out of range.
  Batch get(at::ArrayRef<int64_t> indices) const override;

  /// Class names, by class number.
  const std::vector<std::string>& classes() const;
  std::filesystem::path path(int64_t index) const;
  int64_t target(int64_t index) const;

 private:
  struct Content;
  std::shared_ptr<const Content> content_;
};

}  // namespace lockstep::datasets
