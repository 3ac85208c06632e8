#include "nn/input_gradient.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "collectives/intra_op.h"

namespace lockstep {
namespace {

constexpr int64_t kGrain = 32768;  ///< elements worth a thread, as for torch's own loops

/// dx = scale * dy + slope * (x - mean) + offset. The mean is subtracted first, because it may be large compared with
/// the deviations.
struct Line {
  float mean, slope, scale, offset;
  float at(float dy, float x) const { return scale * dy + (slope * (x - mean) + offset); }
};

std::vector<Line> straight_lines(const ChannelTerms& terms) {
  const auto values = [](const at::Tensor& tensor) { return tensor.const_data_ptr<float>(); };
  std::vector<Line> lines;
  for (int64_t c = 0; c < terms.mean.numel(); ++c) {
    const float scale = values(terms.scale)[c];
    lines.push_back({values(terms.mean)[c], -scale * values(terms.invstd)[c] * values(terms.mean_dy_x)[c], scale,
                     -scale * values(terms.mean_dy)[c]});
  }
  return lines;
}

struct Operands {
  const float* dy;
  const float* x;
  float* dx;
};

/// [batch, channels, ...], contiguous: planes of `size` values of one channel.
void by_planes(const Operands& all, const std::vector<Line>& lines, int64_t planes, int64_t size) {
  const auto channels = static_cast<int64_t>(lines.size());
  intra_op_for(planes, std::max<int64_t>(1, kGrain / size), [&](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; ++plane) {
      const Line line = lines[static_cast<size_t>(plane % channels)];
      const float* const dy = all.dy + plane * size;
      const float* const x = all.x + plane * size;
      float* const dx = all.dx + plane * size;
      for (int64_t i = 0; i < size; ++i) dx[i] = line.at(dy[i], x[i]);
    }
  });
}

/// Channels last: rows with one value of each channel.
void by_rows(const Operands& all, const std::vector<Line>& lines, int64_t rows) {
  const size_t channels = lines.size();
  std::vector<float> mean(channels), slope(channels), scale(channels), offset(channels);
  for (size_t c = 0; c < channels; ++c)
    mean[c] = lines[c].mean, slope[c] = lines[c].slope, scale[c] = lines[c].scale, offset[c] = lines[c].offset;
  const auto width = static_cast<int64_t>(channels);
  intra_op_for(rows, std::max<int64_t>(1, kGrain / width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* const dy = all.dy + row * width;
      const float* const x = all.x + row * width;
      float* const dx = all.dx + row * width;
      for (size_t c = 0; c < channels; ++c) dx[c] = scale[c] * dy[c] + (slope[c] * (x[c] - mean[c]) + offset[c]);
    }
  });
}

/// Any dtype, device and strides.
at::Tensor by_operators(const at::Tensor& dy, const at::Tensor& input, const ChannelTerms& terms) {
  const at::Tensor slope = -terms.scale * terms.invstd * terms.mean_dy_x, offset = -terms.scale * terms.mean_dy;
  at::Tensor gradient = input - beside(terms.mean, input);  // float if the input is half
  gradient.mul_(beside(slope, input))
      .addcmul_(dy.to(terms.mean.scalar_type()), beside(terms.scale, input))
      .add_(beside(offset, input));
  return gradient.to(input.scalar_type());
}

}  // namespace

at::Tensor beside(const at::Tensor& values, const at::Tensor& input) {
  std::vector<int64_t> shape(static_cast<size_t>(input.dim()), 1);
  shape[1] = values.numel();
  return values.view(shape);
}

at::Tensor input_gradient(const at::Tensor& dy, const at::Tensor& input, const ChannelTerms& terms) {
  const bool floats = input.is_cpu() && input.scalar_type() == at::kFloat && dy.scalar_type() == at::kFloat;
  const at::MemoryFormat format = input.suggest_memory_format();
  if (!floats || !input.is_contiguous(format) || !dy.is_contiguous(format)) return by_operators(dy, input, terms);
  at::Tensor gradient = at::empty_like(input, format);
  const Operands all{dy.const_data_ptr<float>(), input.const_data_ptr<float>(), gradient.mutable_data_ptr<float>()};
  const int64_t channels = input.size(1), size = input.numel() / input.size(0) / channels;
  const std::vector<Line> lines = straight_lines(terms);
  if (size == 1 || format != at::MemoryFormat::Contiguous)
    by_rows(all, lines, input.size(0) * size);
  else
    by_planes(all, lines, input.size(0) * channels, size);
  return gradient;
}

}  // namespace lockstep
