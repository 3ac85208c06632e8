#include "data_parallel/gradient_norm.h"

#include <algorithm>
#include <array>
#include <cmath>

#include <ATen/ATen.h>

#include "collectives/intra_op.h"

namespace lockstep {
namespace {

/// The least number of blocks per thread.
constexpr int64_t kBlocksOfAThread = 32;

/// Propagates NaN.
double larger(double a, double b) { return a > b || std::isnan(a) ? a : b; }

/// Processes the elements in eight lanes, as a vector would. `add` gives a lane's next value, `join` combines two
/// lanes.
template <typename T, typename Add, typename Join>
double fold(const T* elements, int64_t count, const Add& add, const Join& join) {
  constexpr int64_t kLanes = 8;
  std::array<double, kLanes> lanes{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      double& value = lanes[static_cast<size_t>(lane)];
      value = add(value, std::abs(static_cast<double>(elements[i + lane])));
    }
  for (size_t lane = 0; i < count; ++i, ++lane)
    lanes[lane] = add(lanes[lane], std::abs(static_cast<double>(elements[i])));
  for (size_t width = kLanes / 2; width > 0; width /= 2)
    for (size_t lane = 0; lane < width; ++lane) lanes[lane] = join(lanes[lane], lanes[lane + width]);
  return lanes[0];
}

template <typename T>
double block(const T* elements, int64_t count, double type) {
  const auto sum = [](double a, double b) { return a + b; };
  if (type == 2)
    return fold(
        elements, count, [](double a, double x) { return a + x * x; }, sum);
  if (type == 1) return fold(elements, count, sum, sum);
  if (std::isinf(type)) return fold(elements, count, larger, larger);
  return fold(
      elements, count, [type](double a, double x) { return a + std::pow(x, type); }, sum);
}

}  // namespace

bool GradientNorm::takes(const at::Tensor& gradient) {
  const at::ScalarType dtype = gradient.scalar_type();
  return gradient.is_cpu() && gradient.layout() == at::kStrided && gradient.is_non_overlapping_and_dense() &&
         (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16);
}

double GradientNorm::of_block(at::ScalarType dtype, const void* elements, int64_t count) const {
  switch (dtype) {
    case at::kFloat:
      return block(static_cast<const float*>(elements), count, type_);
    case at::kDouble:
      return block(static_cast<const double*>(elements), count, type_);
    case at::kHalf:
      return block(static_cast<const at::Half*>(elements), count, type_);
    case at::kBFloat16:
      return block(static_cast<const at::BFloat16*>(elements), count, type_);
    default:
      TORCH_INTERNAL_ASSERT(false, "the norm of gradients of ", dtype);
  }
}

void GradientNorm::add(double block) { total_ = std::isinf(type_) ? larger(total_, block) : total_ + block; }

void GradientNorm::add(const at::Tensor& gradient) {
  const auto* begin = static_cast<const std::byte*>(gradient.const_data_ptr());
  const int64_t elements = gradient.numel();
  std::vector<double> blocks(static_cast<size_t>(blocks_of(elements)));
  intra_op_for(blocks_of(elements), kBlocksOfAThread, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i)
      blocks[static_cast<size_t>(i)] =
          of_block(gradient.scalar_type(), begin + static_cast<size_t>(i * kBlock) * gradient.itemsize(),
                   std::min(kBlock, elements - i * kBlock));
  });
  for (const double one : blocks) add(one);
}

double GradientNorm::norm() const {
  if (type_ == 2) return std::sqrt(total_);
  return type_ == 1 || std::isinf(type_) ? total_ : std::pow(total_, 1 / type_);
}

}  // namespace lockstep
