#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/sequential.h>

#include <lockstep/group.h>
#include <lockstep/named_tensors.h>
#include <lockstep/pipeline.h>

namespace lockstep {

/// A layer of the sequence, before it is made.
struct NamedMaker {
  std::string name;
  Pipeline::MakeLayer make;
  bool is_there = false;  ///< already made; others may hold it
};

/// The layers of a sequence that this rank keeps, those of its stage.
struct StageLayers {
  /// A parameter or buffer of any stage.
  struct Known {
    std::string name;
    at::ScalarType dtype;
    std::vector<int64_t> sizes;
    int stage;
    bool is_buffer;
  };
  torch::nn::Sequential own;
  std::vector<Known> all;  ///< in the order of the sequence's state: parameters, then buffers
};

/// The layers of a sequence, as makers that return the existing layers.
std::vector<NamedMaker> makers_of(const torch::nn::Sequential& layers);

/// Makes the layers one after the other, sets them to rank 0's values and drops other stages' layers. Throws on all
/// ranks of `group` if ranks have different layers, or if stages share a tensor or have nothing to train.
/// REQUIRES: every rank calls it.
StageLayers make_stage(const std::vector<NamedMaker>& layers, const Group& group, const PipelineOptions& options,
                       int stage);

/// The module's parameters and buffers by their names in the sequence.
NamedTensors tensors_of(const torch::nn::Module& module);

}  // namespace lockstep
