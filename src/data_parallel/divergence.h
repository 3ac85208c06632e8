#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>
#include <lockstep/named_tensors.h>

namespace lockstep {

/// A hash of the tensor's elements, bit by bit, in index order.
uint64_t hash_of(const at::Tensor& tensor);

/// Names the first tensor that is not bit-identical on all ranks, and the ranks where it differs from the majority:
/// "a.weight on rank 1 differs from that on ranks 0 and 2". Empty if none, which takes one message of 8 bytes. All
/// ranks get the same answer.
/// REQUIRES: every rank calls it with the same names.
std::string difference_of_ranks(const Group& group, const NamedTensors& tensors);

/// Throws the same Error on all ranks if a tensor is not bit-identical on all of them. The text is
/// difference_of_ranks(), followed by advice.
/// REQUIRES: every rank calls it with the same names.
void check_equal_on_all_ranks(const Group& group, const NamedTensors& tensors);

}  // namespace lockstep
