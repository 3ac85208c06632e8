#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <lockstep/shard.h>

namespace lockstep {

struct DistributedSamplerOptions {
  /// A new order each epoch, the same on every rank; else 0, 1, 2, ...
  bool shuffle = true;
  /// Must be the same on every rank. Unset: the shard's.
  std::optional<uint64_t> seed;
  /// Leave out the samples at the end of the order that do not divide among the ranks, instead of repeating some.
  bool drop_last = false;
  /// Neither repeat nor leave out: every sample once over all ranks, of which the first may have one more than the
  /// others. For evaluation. Excludes `drop_last`.
  bool exactly_once = false;
};

/// Which samples this rank takes in an epoch: what torch.utils.data.DistributedSampler does.
///
/// One order of all samples, the same on every rank, is dealt out like cards: rank r takes places r, r + world_size,
/// r + 2 world_size, ... So the first k batches of all ranks together are the first k batches of a single process that
/// takes batches world_size times as large. Where the samples do not divide, the order is padded with its own beginning
/// (over and over if it is shorter than the padding), and all ranks get the same number.
///
/// The shuffled order depends on `seed + epoch` (modulo 2^64) and on the size alone: it is the same on every machine,
/// compiler and standard library, and for every world size. It is not torch.randperm's.
class DistributedSampler {
 public:
  /// Throws std::invalid_argument for a negative size, a rank outside the world, or options that exclude each other.
  DistributedSampler(int64_t dataset_size, const Shard& shard, DistributedSamplerOptions options = {});

  /// Chooses the order. Must be called with the same number on every rank.
  void set_epoch(int64_t epoch) { epoch_ = epoch; }
  int64_t epoch() const { return epoch_; }

  /// Leaves out the first `places` of the order, over all ranks, which were taken before: an epoch goes on, perhaps on
  /// another number of ranks, with no sample lost or taken twice. Must be called with the same number on every rank.
  void set_start(int64_t places);

  /// Number of indices this rank gets, in every epoch that is not begun in the middle.
  int64_t size() const { return size_; }

  /// This rank's indices in the chosen epoch, from the start on, in order.
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
