#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// [channels] as [1, channels, 1, ...], to combine with an input.
at::Tensor beside(const at::Tensor& values, const at::Tensor& input);

/// One number for each channel, in the dtype in which batch norm computes.
struct ChannelTerms {
  at::Tensor mean, invstd;        ///< of the input
  at::Tensor scale;               ///< weight * invstd
  at::Tensor mean_dy, mean_dy_x;  ///< the means of dy and of dy * normalized x
};

/// The gradient of a batch norm's input: scale * (dy - mean_dy - normalized x * mean_dy_x), in the dtype and the memory
/// format of `input`. `dy` has the input's memory format. Dense floats in CPU memory take one pass.
at::Tensor input_gradient(const at::Tensor& dy, const at::Tensor& input, const ChannelTerms& terms);

}  // namespace lockstep
