#pragma once

#include <functional>
#include <string>

#include <lockstep/group.h>
#include <lockstep/named_tensors.h>

namespace lockstep {

inline constexpr const char* kBeforeAttaching = "DistributedDataParallel attaches to it or refresh() is called";
inline constexpr const char* kBeforeSharding = "it is made a FullyShardedDataParallel";

/// Checks that every rank of the group holds the same list: names, order, shapes, dtypes, requires_grad, device types,
/// and the text that `remark` adds to a tensor's line. Throws the same Error on every rank, with the first difference
/// and the ranks on both sides, or if several ranks have changed tensors that lie in memory once (SharedWeights). For
/// the message, `kind` is "parameter" or "buffer", and `before` the action before which they must be equal.
/// REQUIRES: every rank calls it.
void check_same_on_all_ranks(const Group& group, const std::string& kind, const NamedTensors& tensors,
                             const std::function<std::string(const at::Tensor&)>& remark,
                             const char* before = kBeforeAttaching);

/// check_same_on_all_ranks() for lines of text.
void check_same_on_all_ranks(const Group& group, const std::string& kind, const std::string& lines,
                             const char* before = kBeforeAttaching);

}  // namespace lockstep
