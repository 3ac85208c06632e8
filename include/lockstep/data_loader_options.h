#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include <c10/core/Device.h>

namespace lockstep {

class Sampler;

struct DataLoaderOptions {
  /// Samples a batch on each rank. The batch of the whole world is world_size times as large.
  int64_t batch_size = 1;
  /// batch_size is the whole world's, whatever the number of ranks; an error where it does not divide among them.
  bool split_batches = false;
  /// A new order in each epoch, the same on every rank and for every number of workers.
  bool shuffle = false;
  /// The order is this one's (sampler.h), each rank's with equal orders. Excludes `shuffle`.
  std::shared_ptr<Sampler> sampler = nullptr;
  /// Only full batches, no sample twice: what does not fill a batch on every rank is left out of the epoch. Otherwise
  /// the last batch may be smaller, and ranks that are one sample short repeat one. An error where nothing is left.
  bool drop_last = false;
  /// For evaluation: every sample once over all ranks. Ranks may then differ by one sample, so also by one batch: call
  /// no collective inside the loop, but add up afterwards (evaluate.h). Excludes `drop_last`.
  bool exactly_once = false;
  /// Threads that prepare batches ahead of the loop; 0 prepares each in the loop itself.
  int workers = 1;
  /// Batches each worker may be ahead of the loop.
  int prefetch = 2;
  /// Of the shuffle and of random transforms; must be the same on every rank. Unset: the context's.
  std::optional<uint64_t> seed;
  /// Lay batches into page-locked memory, on the workers, from which copies to a GPU need not wait. Needs CUDA.
  bool pin_memory = false;
  /// Where batches are handed out. A copy to a GPU is put on its current stream, without waiting if memory is pinned.
  std::optional<c10::Device> device;
};

}  // namespace lockstep
