#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <lockstep/shard.h>

namespace lockstep {

struct DistributedSamplerOptions {
  /// Use a new order in each epoch, the same on every rank. False: 0, 1, 2, ...
  bool shuffle = true;
  /// Must be the same on every rank. Unset: the shard's.
  std::optional<uint64_t> seed{};
  /// Leave out the samples at the end of the order that do not divide evenly among the ranks, instead of repeating
  /// some.
  bool drop_last = false;
  /// Neither repeat nor leave out samples: each is on exactly one rank, and the first ranks may have one more than the
  /// others. For evaluation. Excludes `drop_last`.
  bool exactly_once = false;
};

/// Selects the samples that this rank takes in an epoch, like torch.utils.data.DistributedSampler.
///
/// One order of all samples, the same on every rank, is dealt out like cards: rank r takes positions r, r + world_size,
/// r + 2 world_size, ... So the first k batches of all ranks together are the first k batches of a single process that
/// takes batches world_size times as large. If the samples do not divide evenly, the order is padded with its own
/// beginning (repeatedly if it is shorter than the padding), so that all ranks get the same number.
///
/// The shuffled order depends on `seed + epoch` (modulo 2^64) and on the size alone: it is the same for every machine,
/// compiler, standard library and world size. It is not the order of torch.randperm.
class DistributedSampler {
 public:
  /// Throws std::invalid_argument for a dataset without samples, a rank outside the world, or options that exclude each
  /// other.
  DistributedSampler(int64_t dataset_size, const Shard& shard, DistributedSamplerOptions options = {});

  /// Chooses the order. Must be called with the same number on every rank.
  void set_epoch(int64_t epoch) { epoch_ = epoch; }
  int64_t epoch() const { return epoch_; }

  /// Skips the first `places` of the order (over all ranks), which were taken before. The epoch continues, perhaps on a
  /// different number of ranks, without losing or repeating a sample. Must be called with the same number on every
  /// rank.
  void set_start(int64_t places);

  /// The number of indices that this rank gets in a whole epoch.
  int64_t size() const { return size_; }

  /// This rank's indices in the chosen epoch, in order, from the start position.
  std::vector<int64_t> indices() const;

 private:
  const int64_t dataset_size_;
  const Shard shard_;
  const DistributedSamplerOptions options_;
  const int64_t size_;
  int64_t epoch_ = 0;
  int64_t start_ = 0;
};

}  // namespace lockstep
