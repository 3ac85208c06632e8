#pragma once

#include <lockstep/cxx20.h>

#include <cstdint>
#include <memory>
#include <optional>

#include <c10/core/Device.h>

namespace lockstep {

class Sampler;

struct DataLoaderOptions {
  /// Samples a batch on each rank. The batch of the whole world is world_size times as large. With virtual ranks,
  /// "rank" in these comments means a virtual rank; a loader yields the batches of this rank's in turn
  /// (docs/exactness.md).
  int64_t batch_size = 1;
  /// batch_size is the batch of the whole world, whatever the number of ranks. An error if it does not divide evenly
  /// among them.
  bool split_batches = false;
  /// With virtual ranks: consecutive micro-batches of a virtual rank, before those of this rank's next one; equal to
  /// the argument of DistributedDataParallel::accumulate(). No effect without virtual ranks.
  int accumulate = 1;
  /// A new order in each epoch, the same on every rank and for every number of workers.
  bool shuffle = false;
  /// Takes the order from this sampler (sampler.h); every rank's must give the same order. Excludes `shuffle`.
  std::shared_ptr<Sampler> sampler = nullptr;
  /// Only full batches and no repeated samples: what does not fill a batch on every rank is left out of the epoch.
  /// Otherwise the last batch may be smaller, and ranks that are one sample short repeat one. An error if nothing is
  /// left.
  bool drop_last = false;
  /// For evaluation: every sample is on exactly one rank. Ranks may then differ by one sample and so by one batch: do
  /// not call collectives inside the loop, but reduce afterwards (evaluate.h). Excludes `drop_last`.
  bool exactly_once = false;
  /// Threads that prepare batches ahead of the loop; 0 prepares each in the loop itself.
  int workers = 1;
  /// The number of batches that each worker may be ahead of the loop.
  int prefetch = 2;
  /// Seed of the shuffle and of random transforms; must be the same on every rank. Unset: the context's.
  std::optional<uint64_t> seed{};
  /// Put batches into page-locked memory on the workers, so that copies to a GPU need not wait. Needs CUDA.
  bool pin_memory = false;
  /// The device of the batches. A copy to a GPU goes onto its current stream, without waiting if memory is pinned.
  std::optional<c10::Device> device{};
};

}  // namespace lockstep
