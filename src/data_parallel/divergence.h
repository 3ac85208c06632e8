#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>
#include <lockstep/named_tensors.h>

namespace lockstep {

/// A hash of the tensor's elements, bit by bit, in the order of its indices.
uint64_t hash_of(const at::Tensor& tensor);

/// Which tensor is not the same, bit by bit, on all ranks, and on which ranks it differs from most: "a.weight on rank 1
/// is not what it is on ranks 0 and 2"; of several the first. Empty if there is none. One message of 8 bytes if all is
/// well. Every rank calls it with the same names; all get the same answer.
std::string difference_of_ranks(const Group& group, const NamedTensors& tensors);

/// Throws the same Error on all ranks if a tensor is not the same, bit by bit, on all of them: names the first one, and
/// the ranks that differ from most. One message of 8 bytes if all is well. Every rank calls it with the same names.
void check_equal_on_all_ranks(const Group& group, const NamedTensors& tensors);

}  // namespace lockstep
