#include "reducer/bucket_plan.h"

#include <map>
#include <utility>

namespace lockstep {

std::vector<std::vector<size_t>> plan_buckets(const std::vector<ParameterSize>& parameters, BucketLimits limits) {
  struct Open {
    std::vector<size_t> parameters;
    int64_t bytes = 0;
  };
  std::map<int, Open> open;
  std::vector<std::vector<size_t>> plan;
  for (size_t left = parameters.size(); left > 0; --left) {
    const size_t index = left - 1;
    Open& bucket = open[parameters[index].kind];
    bucket.parameters.push_back(index);
    bucket.bytes += parameters[index].bytes;
    if (bucket.bytes >= (plan.empty() ? limits.first_bytes : limits.bytes))
      plan.push_back(std::exchange(bucket, {}).parameters);
  }
  for (auto& [kind, bucket] : open)
    if (!bucket.parameters.empty()) plan.push_back(std::move(bucket.parameters));
  return plan;
}

std::vector<int64_t> bucket_layout(const std::vector<int64_t>& elements, size_t element_bytes) {
  const auto aligned = static_cast<int64_t>(64 / element_bytes);
  std::vector<int64_t> places;
  int64_t end = 0;
  for (const int64_t count : elements) {
    places.push_back((end + aligned - 1) / aligned * aligned);
    end = places.back() + count;
  }
  places.push_back(end);
  return places;
}

}  // namespace lockstep
