// Buffers that machines send with their pseudo-gradients.

#include "diloco/buffer_average.h"

#include <cmath>

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace lockstep::diloco {
namespace {

NamedTensors buffers_of(double value) {
  return {{"mean", at::full({2, 3}, value, at::kFloat)},
          {"half", at::full({4}, value, at::kHalf)},
          {"double", at::full({}, value / 3, at::kDouble)},
          {"complex", at::full({2}, c10::complex<double>(value, -value), at::kComplexDouble)},
          {"none", at::zeros({0}, at::kFloat)},
          {"count", at::full({}, static_cast<int64_t>(value), at::kLong)}};
}

TEST(BufferAverage, IsTheMeanOfThoseThatAreAddedAndLeavesWholeNumbers) {
  const NamedTensors own = buffers_of(1);
  BufferAverage average(own);
  for (const double value : {1, 4, 10}) {
    const std::string bytes = buffer_bytes(buffers_of(value));
    ASSERT_EQ(static_cast<int64_t>(bytes.size()), bytes_of_buffers(own));
    EXPECT_TRUE(average.add(bytes));
  }
  average.set();
  const NamedTensors expected = buffers_of(5);
  for (size_t i = 0; i + 1 < own.size(); ++i)
    EXPECT_TRUE(at::allclose(own[i].second, expected[i].second)) << own[i].first << own[i].second;
  EXPECT_EQ(own.back().second.item<int64_t>(), 1);
}

TEST(BufferAverage, LeavesOutOneThatIsNotFiniteAndWithoutAnyChangesNothing) {
  for (const double bad : {std::nan(""), HUGE_VAL}) {
    NamedTensors own = buffers_of(2);
    own[0].second[1][2] = bad;
    BufferAverage average(own);
    EXPECT_FALSE(average.add(buffer_bytes(own)));
    average.set();
    EXPECT_FALSE(std::isfinite(own[0].second[1][2].item<float>()));
    EXPECT_TRUE(average.add(buffer_bytes(buffers_of(6))));
    average.set();
    EXPECT_TRUE(own[0].second.eq(6).all().item<bool>());
  }
}

TEST(BufferAverage, EqualOnesStayTheSameBits) {
  const NamedTensors own = {{"mean", at::rand({1000})}};
  const at::Tensor before = own[0].second.clone();
  BufferAverage average(own);
  for (int i = 0; i < 3; ++i) average.add(buffer_bytes(own));
  average.set();
  EXPECT_TRUE(own[0].second.equal(before));
}

}  // namespace
}  // namespace lockstep::diloco
