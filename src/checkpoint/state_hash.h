#pragma once

#include <sstream>
#include <string>

#include <ATen/core/Tensor.h>

#include "base/hash.h"

namespace lockstep {

/// Adds one tensor of a state, for lockstep::hash() of the state.
inline void add_to_hash(Hash& hash, const std::string& name, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), "hash: the state's tensor `", name, "` is an undefined tensor");
  const at::Tensor dense = tensor.detach().to(at::kCPU).contiguous();
  std::ostringstream type;
  type << dense.scalar_type() << dense.sizes();
  hash.add(name);
  hash.add(type.str());
  hash.add(dense.const_data_ptr(), dense.nbytes());
}

}  // namespace lockstep
