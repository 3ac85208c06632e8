#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>

namespace lockstep {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Checks that every rank of the group holds the same list: names, order, shapes, dtypes, requires_grad, devices'
/// types. Throws the same Error on every rank, naming the first difference and both sides. Every rank calls it.
/// `kind` is "parameter" or "buffer", for the message.
void check_same_on_all_ranks(const Group& group, const std::string& kind, const NamedTensors& tensors);

/// The first difference between ranks' descriptions, or an empty string. Line i of a description is tensor i.
std::string first_difference(const std::string& kind, const std::vector<std::string>& descriptions);

}  // namespace lockstep
