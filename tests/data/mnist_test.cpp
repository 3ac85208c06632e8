#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <lockstep/datasets.h>
#include <lockstep/error.h>

#include <vector>

#include "data/idx_writer.h"

namespace lockstep {
namespace {

using datasets::FashionMNIST;
using datasets::MNIST;

std::string pixels(uint32_t images) {
  std::string text(images * 784, '\0');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i % 256);
  return text;
}

class MNISTTest : public ::testing::Test {
 protected:
  /// Three images and labels, as plain files.
  void SetUp() override {
    for (const std::string stem : {"train", "t10k"}) {
      folder_.write(stem + "-images-idx3-ubyte", idx_header({3, 28, 28}) + pixels(3));
      folder_.write(stem + "-labels-idx1-ubyte", idx_header({3}) + std::string("\x09\x00\x05", 3));
    }
  }
  std::string failure(const std::filesystem::path& folder) const {
    return failure_of<Error>([&] { FashionMNIST(folder, kTrain); });
  }
  void expect_failure(std::initializer_list<std::string> parts) const {
    const std::string text = failure(folder_.path());
    for (const auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
  }
  const TemporaryFolder folder_;
};

TEST_F(MNISTTest, KeepsTheBytesOfTheFiles) {
  const MNIST data(folder_.path(), kTest);
  EXPECT_EQ(data.size(), 3);
  EXPECT_EQ(data.images().sizes(), (std::vector<int64_t>{3, 1, 28, 28}));
  const auto bytes = data.images().flatten();
  for (int64_t i = 0; i < bytes.numel(); ++i) ASSERT_EQ(bytes.data_ptr<uint8_t>()[i], i % 256);
  EXPECT_TRUE(at::equal(data.targets(), at::tensor({9, 0, 5}, at::kLong)));
}

/// Values of torchvision's ToTensor and Normalize in float32, printed by PyTorch for pixels 0, 1, 2, 127, 128, 254,
/// 255.
void expect_values(const Dataset& data, const std::vector<float>& expected) {
  const Batch batch = data.get({0});
  const std::vector<int> at{0, 1, 2, 127, 128, 254, 255};
  for (size_t i = 0; i < at.size(); ++i)
    EXPECT_EQ(batch.data.data_ptr<float>()[at[i]], expected[i]) << "pixel " << at[i];
}

TEST_F(MNISTTest, NormalisesAsPyTorchDoes) {
  expect_values(MNIST(folder_.path(), kTrain), {-0x1.b264e2p-2, -0x1.a55c4p-2, -0x1.9853ap-2, 0x1.3138c8p+0,
                                                0x1.347af4p+0, 0x1.678566p+1, 0x1.69267ap+1});
  expect_values(FashionMNIST(folder_.path(), kTrain), {-0x1.9ed252p-1, -0x1.992236p-1, -0x1.937218p-1, 0x1.338c06p-1,
                                                       0x1.393c26p-1, 0x1.017a98p+1, 0x1.02e69ep+1});
  expect_values(MNIST(folder_.path(), kTrain, {.normalize = false}),
                {0.0f, 1 / 255.0f, 2 / 255.0f, 127 / 255.0f, 128 / 255.0f, 254 / 255.0f, 1.0f});
}

TEST_F(MNISTTest, GivesTheSamplesAskedFor) {
  const MNIST data(folder_.path(), kTrain);
  const std::vector<int64_t> order{2, 0, 2};
  const Batch batch = data.get(order);
  EXPECT_EQ(batch.data.sizes(), (std::vector<int64_t>{3, 1, 28, 28}));
  EXPECT_EQ(batch.data.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(batch.target, at::tensor({5, 9, 5}, at::kLong)));
  for (int64_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(batch.data[i], data.get({order[i]}).data[0]));
  EXPECT_EQ(data.get({}).data.size(0), 0);
}

TEST_F(MNISTTest, IndicesOutOfRange) {
  const MNIST data(folder_.path(), kTrain);
  for (int64_t index : {-1, 3})
    EXPECT_NE(failure_of<c10::Error>([&] {
                data.get({0, index});
              }).find("sample " + std::to_string(index) + " of a dataset of 3"),
              std::string::npos);
}

TEST_F(MNISTTest, CopiesShareTheImages) {
  const MNIST data(folder_.path(), kTrain);
  const MNIST copy = data;
  EXPECT_EQ(copy.images().data_ptr(), data.images().data_ptr());
}

TEST_F(MNISTTest, NoFolder) {
  const std::string text = failure("/nowhere/at/all");
  for (const char* part :
       {"'/nowhere/at/all' does not exist", "dataset-fashion-mnist", "/usr/share/datasets/fashion-mnist"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST_F(MNISTTest, AMissingFileIsNamed) {
  std::filesystem::remove(folder_.path() / "train-labels-idx1-ubyte");
  expect_failure({folder_.path().string(), "train-labels-idx1-ubyte", "train-labels-idx1-ubyte.gz"});
}

TEST_F(MNISTTest, AsManyLabelsAsImages) {
  folder_.write("train-labels-idx1-ubyte", idx_header({2}) + std::string("\x01\x02"));
  expect_failure({"train-labels-idx1-ubyte", "expected 3 labels", "train-images-idx3-ubyte", "found 2"});
}

TEST_F(MNISTTest, LabelsOutOfRange) {
  folder_.write("train-labels-idx1-ubyte", idx_header({3}) + std::string("\x09\x0a\xff"));
  expect_failure({"train-labels-idx1-ubyte", "label 1 is 10", "0 to 9"});
}

TEST_F(MNISTTest, ImagesOfAnotherSize) {
  folder_.write("train-images-idx3-ubyte", idx_header({3, 32, 32}) + std::string(3 * 32 * 32, '\0'));
  expect_failure({"train-images-idx3-ubyte", "0 x 28 x 28", "3 x 32 x 32"});
}

TEST_F(MNISTTest, EmptyFilesAreAnEmptyDataset) {
  folder_.write("train-images-idx3-ubyte", idx_header({0, 28, 28}));
  folder_.write("train-labels-idx1-ubyte", idx_header({0}));
  EXPECT_EQ(FashionMNIST(folder_.path(), kTrain).size(), 0);
}

/// The real images against sums that NumPy computed from the same files: weighted by image and by pixel, so that
/// neither may be out of place.
void expect_real(Split split, int64_t size, int64_t by_image, int64_t by_pixel, int64_t by_label) {
  const FashionMNIST data("/usr/share/datasets/fashion-mnist", split);
  ASSERT_EQ(data.size(), size);
  const at::Tensor images = data.images().view({size, 784});
  const at::Tensor number = at::arange(1, size + 1, at::kLong);
  EXPECT_EQ((images.sum(1, false, at::kLong) * number).sum().item<int64_t>(), by_image);
  EXPECT_EQ((images.sum(0, false, at::kLong) * at::arange(1, 785, at::kLong)).sum().item<int64_t>(), by_pixel);
  EXPECT_EQ((data.targets() * number).sum().item<int64_t>(), by_label);
}

TEST(FashionMNISTTest, RealFiles) {
  if (!std::filesystem::exists("/usr/share/datasets/fashion-mnist"))
    GTEST_SKIP() << "no /usr/share/datasets/fashion-mnist: apt-get install dataset-fashion-mnist";
  expect_real(kTrain, 60000, 103055449636171, 1413923198216, 8087486427);
  expect_real(kTest, 10000, 2867379403525, 236710503601, 225777341);
}

}  // namespace
}  // namespace lockstep
