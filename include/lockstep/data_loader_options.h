#pragma once

#include <lockstep/cxx20.h>

#include <cstdint>
#include <memory>
#include <optional>

#include <c10/core/Device.h>

namespace lockstep {

class Sampler;

struct DataLoaderOptions {
  /// Samples per batch on each rank. The batch of the whole world is world_size times as large. With virtual ranks,
  /// "rank" in these comments means a virtual rank, and a loader yields the batches of this rank's virtual ranks in
  /// turn (docs/exactness.md).
  int64_t batch_size = 1;
  /// batch_size is the batch of the whole world, whatever the number of ranks. An error if it does not divide evenly
  /// among them.
  bool split_batches = false;
  /// With virtual ranks: consecutive micro-batches of one virtual rank before those of the next. Must equal the
  /// argument of DistributedDataParallel::accumulate(). No effect without virtual ranks.
  int accumulate = 1;
  /// Use a new order in each epoch, the same on every rank and for any number of workers.
  bool shuffle = false;
  /// Take the order from this sampler (sampler.h). Every rank's must give the same order. Excludes `shuffle`.
  std::shared_ptr<Sampler> sampler = nullptr;
  /// Use only full batches and repeat no samples: samples that do not fill a batch on every rank are left out of the
  /// epoch. Otherwise the last batch may be smaller, and ranks that are one sample short repeat one. An error if
  /// nothing is left.
  bool drop_last = false;
  /// For evaluation: every sample is on exactly one rank. Ranks may then differ by one sample, and so by one batch: do
  /// not call collectives inside the loop, but reduce afterwards (evaluate.h). Excludes `drop_last`.
  bool exactly_once = false;
  /// Threads that prepare batches ahead of the loop. 0: the loop itself prepares each batch.
  int workers = 1;
  /// The number of batches that each worker may be ahead of the loop.
  int prefetch = 2;
  /// Seed of the shuffle and of random transforms; must be the same on every rank. Unset: the context's.
  std::optional<uint64_t> seed{};
  /// Workers put batches into page-locked memory, so that copies to a GPU need not wait. Needs CUDA.
  bool pin_memory = false;
  /// The device of the batches. A copy to a GPU is queued on its current stream, without waiting if memory is pinned.
  std::optional<c10::Device> device{};
};

}  // namespace lockstep
