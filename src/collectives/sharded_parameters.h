#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// While it lives, is_sharded() is true for these parameters: a FullyShardedDataParallel has them, and their own .grad
/// is undefined. Any thread may use it.
class ShardedParameters {
 public:
  explicit ShardedParameters(std::vector<at::Tensor> parameters);
  ~ShardedParameters();
  ShardedParameters(const ShardedParameters&) = delete;
  ShardedParameters& operator=(const ShardedParameters&) = delete;

 private:
  const std::vector<at::Tensor> parameters_;
};

bool is_sharded(const at::Tensor& parameter);

}  // namespace lockstep
