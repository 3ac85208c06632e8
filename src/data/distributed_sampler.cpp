#include <lockstep/distributed_sampler.h>

#include <numeric>
#include <stdexcept>
#include <string>

#include "data/permutation.h"

namespace lockstep {
namespace {

int64_t indices_of_rank(int64_t dataset_size, const Shard& shard, const DistributedSamplerOptions& options) {
  const int rank = shard.rank, world_size = shard.world_size;
  if (dataset_size <= 0)
    throw std::invalid_argument("DistributedSampler: the dataset has no samples: its size is " +
                                std::to_string(dataset_size));
  if (rank < 0 || rank >= world_size)
    throw std::invalid_argument("DistributedSampler: rank " + std::to_string(rank) + " is not in a world of " +
                                std::to_string(world_size));
  if (options.drop_last && options.exactly_once)
    throw std::invalid_argument(
        "DistributedSampler: drop_last omits samples and exactly_once keeps all of them; set only one");
  const int64_t each = dataset_size / world_size, left_over = dataset_size % world_size;
  if (options.drop_last || left_over == 0) return each;
  if (options.exactly_once) return each + (rank < left_over ? 1 : 0);
  return each + 1;
}

}  // namespace

DistributedSampler::DistributedSampler(int64_t dataset_size, const Shard& shard, DistributedSamplerOptions options)
    : dataset_size_(dataset_size),
      shard_(shard),
      options_(options),
      size_(indices_of_rank(dataset_size, shard, options)) {}

void DistributedSampler::set_start(int64_t places) {
  if (places < 0 || places > dataset_size_)
    throw std::invalid_argument("DistributedSampler: a start at position " + std::to_string(places) + " of " +
                                std::to_string(dataset_size_));
  start_ = places;
}

std::vector<int64_t> DistributedSampler::indices() const {
  std::vector<int64_t> order;
  if (options_.shuffle)
    order = permutation(dataset_size_, options_.seed.value_or(shard_.seed) + static_cast<uint64_t>(epoch_));
  const int64_t left = dataset_size_ - start_;
  std::vector<int64_t> mine(left > 0 ? indices_of_rank(left, shard_, options_) : 0);
  for (size_t i = 0; i < mine.size(); ++i) {
    // Only padding lies beyond the end, where the order starts again from the beginning.
    const int64_t place = (start_ + shard_.rank + static_cast<int64_t>(i) * shard_.world_size) % dataset_size_;
    mine[i] = options_.shuffle ? order[place] : place;
  }
  return mine;
}

}  // namespace lockstep
