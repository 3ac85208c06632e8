#pragma once

#include <array>
#include <filesystem>
#include <memory>

#include <lockstep/dataset.h>

namespace lockstep {

class PixelValues;

enum class Split { kTrain, kTest };
using enum Split;

namespace datasets {

struct MNISTOptions {
  /// Shift and scale pixels to mean 0 and standard deviation 1 over the training images. Otherwise they stay in 0 .. 1.
  bool normalize = true;
};

/// The handwritten digits: 28 x 28 grey images with labels 0 .. 9.
///
/// Batches are `data` float32 [n, 1, 28, 28], (pixel / 255 - 0.1307) / 0.3081, and `target` int64 [n]. Copies of the
/// dataset share the images, which are stored once, as bytes.
class MNIST : public Dataset {
 public:
  /// Reads `train-images-idx3-ubyte` and `train-labels-idx1-ubyte`, or `t10k-...`, from `folder`; or, if only that
  /// exists, the same name with `.gz`. Any number of images is accepted.
  ///
  /// Throws Error naming the file, with expected and found values, if a folder or file is missing or unreadable, has
  /// another format, is shorter or longer than its header says, or holds a label above 9.
  MNIST(const std::filesystem::path& folder, Split split, MNISTOptions options = {});

  int64_t size() const override;
  /// Throws c10::Error for an index out of range.
  Batch get(at::ArrayRef<int64_t> indices) const override;

  /// All images as stored in the file: uint8 [size, 1, 28, 28]. Not a copy; do not write to it.
  const at::Tensor& images() const { return images_; }
  /// All labels: int64 [size]. Not a copy; do not write to it.
  const at::Tensor& targets() const { return targets_; }

 protected:
  struct Source;
  MNIST(const std::filesystem::path& folder, Split split, MNISTOptions options, const Source& source);

 private:
  at::Tensor images_;
  at::Tensor targets_;
  std::array<float, 256> value_of_pixel_;
};

/// Zalando's articles of clothing, in the format of MNIST; normalised by mean 0.2860 and standard deviation 0.3530.
/// Debian's package dataset-fashion-mnist installs it in /usr/share/datasets/fashion-mnist.
class FashionMNIST : public MNIST {
 public:
  FashionMNIST(const std::filesystem::path& folder, Split split, MNISTOptions options = {});
};

struct CIFAROptions {
  /// Leave the pixels as bytes, uint8 0 .. 255, for transforms (transforms.h). Otherwise they are float32, shifted and
  /// scaled to mean 0 and standard deviation 1 over the training images.
  bool as_bytes = false;
};

/// The common part of CIFAR-10 and CIFAR-100: 32 x 32 colour images. Batches are `data` [n, 3, 32, 32] (red, green,
/// blue) and `target` int64 [n]. Copies of the dataset share the images, which are stored once, as bytes.
class CIFAR : public Dataset {
 public:
  int64_t size() const override;
  /// Throws c10::Error for an index out of range.
  Batch get(at::ArrayRef<int64_t> indices) const override;

  /// All images as stored in the file: uint8 [size, 3, 32, 32]. Not a copy; do not write to it.
  const at::Tensor& images() const { return images_; }
  /// All labels: int64 [size]. Not a copy; do not write to it.
  const at::Tensor& targets() const { return targets_; }

 protected:
  struct Content;
  explicit CIFAR(Content content);

 private:
  at::Tensor images_;
  at::Tensor targets_;
  bool as_bytes_;
  std::shared_ptr<const PixelValues> values_;
};

/// Ten classes of animals and vehicles.
class CIFAR10 : public CIFAR {
 public:
  static constexpr std::array<float, 3> kMean{0.4914f, 0.4822f, 0.4465f};
  static constexpr std::array<float, 3> kStandardDeviation{0.2470f, 0.2435f, 0.2616f};

  /// `path` is the binary version: cifar-10-binary.tar.gz, which is read in place and never extracted, the folder
  /// cifar-10-batches-bin, or a folder that holds either. Files may hold fewer than their 10,000 images.
  ///
  /// Throws Error naming the file, with expected and found values, if a file is missing, truncated, corrupt or too
  /// long, or holds a label that is not a class. Memory is bounded whatever the archive holds, and no path in it is
  /// ever opened.
  CIFAR10(const std::filesystem::path& path, Split split, CIFAROptions options = {});
};

struct CIFAR100Options {
  bool as_bytes = false;
  /// Targets are the 20 coarse classes, not the 100 fine ones.
  bool coarse = false;
};

/// A hundred classes. Like CIFAR10, with cifar-100-binary.tar.gz or the folder cifar-100-binary.
class CIFAR100 : public CIFAR {
 public:
  static constexpr std::array<float, 3> kMean{0.5071f, 0.4865f, 0.4409f};
  static constexpr std::array<float, 3> kStandardDeviation{0.2673f, 0.2564f, 0.2762f};

  CIFAR100(const std::filesystem::path& path, Split split, CIFAR100Options options = {});
};

}  // namespace datasets
}  // namespace lockstep
