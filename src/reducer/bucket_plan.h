#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep {

/// A parameter as the plan sees it. Parameters of one `kind` (dtype and device) can share a bucket.
struct ParameterSize {
  int64_t bytes;
  int kind;
};

struct BucketLimits {
  int64_t first_bytes;  ///< the first bucket is small, so that communication starts early
  int64_t bytes;
};

/// Splits parameters into buckets. A bucket is a list of parameter indices in the order in which gradients usually
/// become ready, the reverse order of registration. The parameter that reaches the limit closes the bucket, so a
/// parameter larger than the limit is alone in its bucket or the last. Each kind fills its own buckets. Buckets are
/// ordered as they close, and all ranks reduce them in that order. The small limit applies to the first bucket of the
/// whole plan. A pure function: every rank gets the same result for the same input.
std::vector<std::vector<size_t>> plan_buckets(const std::vector<ParameterSize>& parameters, BucketLimits limits);

/// The offsets of gradients with these numbers of elements in their bucket, in elements. Each is a multiple of 64
/// bytes, as the fastest kernels require. The last number is the total number of elements.
std::vector<int64_t> bucket_layout(const std::vector<int64_t>& elements, size_t element_bytes);

}  // namespace lockstep
