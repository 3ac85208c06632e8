#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <lockstep/data_loader_options.h>
#include <lockstep/shard.h>

#include "data/sampler_order.h"

namespace lockstep::detail {

/// The division of a loader's epoch: the samples of a rank, and the sizes of its batches. "Start" is always the number
/// of positions in the epoch's order that were taken before a checkpoint.
class EpochPlan {
 public:
  /// Throws c10::Error for invalid options. `tensors_are_known`: whether the tensors of a batch are known.
  EpochPlan(int64_t dataset_size, const Shard& shard, DataLoaderOptions options, bool tensors_are_known);

  const DataLoaderOptions& options() const { return options_; }
  const Shard& shard() const { return shard_; }
  int64_t dataset_size() const { return dataset_size_; }
  uint64_t seed() const { return options_.seed.value_or(shard_.seed); }
  /// Null if the options have none.
  SamplerOrder* sampler() { return sampler_ ? &*sampler_ : nullptr; }
  const SamplerOrder* sampler() const { return sampler_ ? &*sampler_ : nullptr; }

  /// The number of positions in the epoch's order.
  int64_t places() const { return sampler_ ? sampler_->size() : dataset_size_; }
  /// The parts of the data that this rank reads: its own, or its virtual ranks'.
  std::vector<Shard> shards() const;
  int64_t shard_count() const;  ///< on all ranks together
  /// Samples of an epoch from `start` on in each part, some of which drop_last may omit.
  std::vector<int64_t> samples_of_shards(int64_t start) const;

  int64_t batch_size() const { return batch_size_; }
  int64_t batches_in(int64_t samples) const;
  /// Consecutive micro-batches of one part.
  int64_t batches_in_a_row() const { return shard_.virtual_ranks ? options_.accumulate : 1; }

  /// The samples of a pass, by part.
  std::vector<std::vector<int64_t>> indices(int epoch, int64_t start);

 private:
  const int64_t dataset_size_;
  const Shard shard_;
  const DataLoaderOptions options_;
  int64_t batch_size_;
  std::optional<SamplerOrder> sampler_;
};

}  // namespace lockstep::detail
