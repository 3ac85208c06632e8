#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep {

/// What the plan needs to know of a parameter. Parameters of one `kind` (dtype and device) can share a bucket.
struct ParameterSize {
  int64_t bytes;
  int kind;
};

struct BucketLimits {
  int64_t first_bytes;  ///< the first bucket is small, so that communication starts early
  int64_t bytes;
};

/// Splits parameters into buckets: indices of parameters, in the order in which gradients usually become ready, which
/// is the reverse order of registration. A bucket is closed by the parameter that fills it, so one larger than the
/// limit has a bucket of its own or ends one. Buckets of each kind fill on their own; the order of buckets is the
/// order in which they close, and that is the order in which all ranks reduce them. The first bucket of the whole
/// plan has the small limit. Pure: the same on every rank for the same input.
std::vector<std::vector<size_t>> plan_buckets(const std::vector<ParameterSize>& parameters, BucketLimits limits);

}  // namespace lockstep
