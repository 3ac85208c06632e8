#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// The reason why a state's tensor holds no numbers that could be copied; "" if it does.
std::string problem_of_given(const at::Tensor& given);

/// The reason why `given` cannot be copied to `own`, whatever its shape; "" if it can. `where` is, for example, "the
/// module". A state is checked as a whole before the first of its tensors is copied, so that an error changes nothing.
std::string problem_of_copy(const at::Tensor& given, const at::Tensor& own, const std::string& where);

}  // namespace lockstep
