#pragma once

#include <functional>
#include <string>

#include <lockstep/group.h>
#include <lockstep/named_tensors.h>

namespace lockstep {

/// Checks that every rank of the group holds the same list: names, order, shapes, dtypes, requires_grad, device types,
/// and the text that `remark` adds to a tensor's line. Throws the same Error on every rank, with the first difference
/// and the ranks on both sides, or where several ranks have changed tensors that lie in memory once (SharedWeights).
/// `kind` is "parameter" or "buffer", for the message.
/// REQUIRES: every rank calls it.
void check_same_on_all_ranks(const Group& group, const std::string& kind, const NamedTensors& tensors,
                             const std::function<std::string(const at::Tensor&)>& remark);

/// check_same_on_all_ranks() for lines of text.
void check_same_on_all_ranks(const Group& group, const std::string& kind, const std::string& lines);

}  // namespace lockstep
