#pragma once

#include <array>
#include <filesystem>

#include <lockstep/dataset.h>

namespace lockstep {

enum class Split { kTrain, kTest };
using enum Split;

namespace datasets {

struct MNISTOptions {
  /// Shift and scale pixels to mean 0 and standard deviation 1 over the training images; else they stay in 0 .. 1.
  bool normalize = true;
};

/// The handwritten digits: 28 x 28 grey images with labels 0 .. 9.
///
/// Batches are `data` float32 [n, 1, 28, 28], (pixel / 255 - 0.1307) / 0.3081, and `target` int64 [n].
/// Copies share the images, which are kept once, as bytes.
class MNIST : public Dataset {
 public:
  /// Reads `train-images-idx3-ubyte` and `train-labels-idx1-ubyte`, or `t10k-...`, from `folder`; where only the same
  /// name with `.gz` is there, that one. Any number of images will do.
  ///
  /// Throws Error naming the file, with expected and found, for a folder or file that is missing or unreadable, is not
  /// what its name says, is shorter or longer than its header announces, or holds a label above 9. Nothing is kept of
  /// a file that fails.
  MNIST(const std::filesystem::path& folder, Split split, MNISTOptions options = {});

  int64_t size() const override;
  /// Throws c10::Error for an index out of range.
  Batch get(at::ArrayRef<int64_t> indices) const override;

  /// All images as they are in the file: uint8 [size, 1, 28, 28]. Not a copy; not to be written to.
  const at::Tensor& images() const { return images_; }
  /// All labels: int64 [size]. Not a copy; not to be written to.
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

}  // namespace datasets
}  // namespace lockstep
