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

/// Splits parameters into buckets: indices of parameters, in the order in which gradients usually become ready, which
/// is the reverse order of registration. The parameter that reaches the limit closes the bucket, so one larger than the
/// limit has a bucket to itself or is the last in one. Each kind fills buckets of its own; buckets are ordered as they
/// close, and all ranks reduce them in that order. The first bucket of the whole plan has the small limit. Pure: the
/// same on every rank for the same input.
std::vector<std::vector<size_t>> plan_buckets(const std::vector<ParameterSize>& parameters, BucketLimits limits);

/// Where gradients of so many elements begin in their bucket, in elements: each at a multiple of 64 bytes, as the
/// fastest kernels want it. And as the last number, how many elements they take.
std::vector<int64_t> bucket_layout(const std::vector<int64_t>& elements, size_t element_bytes);

}  // namespace lockstep
