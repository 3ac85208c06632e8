#include "data/epoch_plan.h"

#include <ATen/Context.h>

#include <lockstep/distributed_sampler.h>

#include <utility>

#include "base/virtual_ranks.h"

namespace lockstep {
namespace {

DistributedSamplerOptions sampler_options(const DataLoaderOptions& options) {
  return {.shuffle = options.shuffle,
          .seed = options.seed,
          .drop_last = options.drop_last,
          .exactly_once = options.exactly_once};
}

void check(const DataLoaderOptions& options, const Shard& shard, int64_t shards, bool tensors_are_known) {
  TORCH_CHECK(options.batch_size > 0, "DataLoader: batch_size is ", options.batch_size,
              "; set it to the number of samples per rank and step, at least 1");
  TORCH_CHECK(options.workers >= 0, "DataLoader: workers is ", options.workers,
              "; set it to a number of threads, or to 0 to load batches in the training loop itself");
  TORCH_CHECK(options.prefetch > 0, "DataLoader: prefetch is ", options.prefetch,
              "; set it to the number of batches that a worker may prepare ahead, at least 1");
  TORCH_CHECK(!(options.drop_last && options.exactly_once),
              "DataLoader: drop_last omits samples and exactly_once keeps all of them; set only one");
  TORCH_CHECK(!(options.shuffle && options.sampler != nullptr),
              "DataLoader: the sampler decides the order, so shuffle has no effect; leave out one of the two");
  TORCH_CHECK(shard.rank >= 0 && shard.rank < shard.world_size, "DataLoader: rank ", shard.rank,
              " is not in a world of ", shard.world_size);
  TORCH_CHECK(options.accumulate > 0, "DataLoader: accumulate is ", options.accumulate,
              "; set it to the number of micro-batches per step, at least 1");
  TORCH_CHECK(!options.split_batches || options.batch_size % shards == 0,
              "DataLoader: with split_batches the batch_size of ", options.batch_size, " is divided among ", shards,
              shard.virtual_ranks ? " virtual ranks" : " ranks",
              ", but does not divide evenly; set it to a multiple of ", shards,
              ", or leave out split_batches and give each rank's batch_size");
  TORCH_CHECK(!options.pin_memory || at::hasCUDA(),
              "DataLoader: pin_memory needs CUDA, which this LibTorch or this machine does not have; leave it out");
  TORCH_CHECK(!options.device || !options.device->is_cuda() || at::hasCUDA(), "DataLoader: the device is ",
              options.device.value_or(at::kCPU),
              ", but this LibTorch or this machine has no CUDA; leave the device out");
  TORCH_CHECK(tensors_are_known || !(options.pin_memory || options.device),
              "DataLoader: pin_memory and device must find the tensors of a batch, which this type of batch does not "
              "list; give it a member for_each_tensor (example_loader.h), or leave the options out");
}

}  // namespace

namespace detail {

EpochPlan::EpochPlan(int64_t dataset_size, const Shard& shard, DataLoaderOptions options, bool tensors_are_known)
    : dataset_size_(dataset_size), shard_(shard), options_(std::move(options)) {
  TORCH_CHECK(dataset_size > 0, "DataLoader: the dataset has no samples: its size() is ", dataset_size);
  check(options_, shard_, shard_count(), tensors_are_known);
  batch_size_ = options_.split_batches ? options_.batch_size / shard_count() : options_.batch_size;
  if (options_.sampler != nullptr) sampler_.emplace(options_.sampler, dataset_size);
  TORCH_CHECK(places() > 0, "DataLoader: the sampler is empty: its size() is ", places());
}

std::vector<Shard> EpochPlan::shards() const {
  if (!shard_.virtual_ranks) return {shard_};
  std::vector<Shard> own;
  const LeafRange block = shard_.virtual_ranks->block();
  for (int v = block.first; v < block.last; ++v) own.emplace_back(v, shard_.virtual_ranks->count(), shard_.seed);
  return own;
}

int64_t EpochPlan::shard_count() const {
  return shard_.virtual_ranks ? shard_.virtual_ranks->count() : shard_.world_size;
}

std::vector<int64_t> EpochPlan::samples_of_shards(int64_t start) const {
  std::vector<int64_t> samples;
  for (const Shard& own : shards())
    samples.push_back(start == places() ? 0
                                        : DistributedSampler(places() - start, own, sampler_options(options_)).size());
  return samples;
}

int64_t EpochPlan::batches_in(int64_t samples) const {
  return samples / batch_size_ + (!options_.drop_last && samples % batch_size_ != 0 ? 1 : 0);
}

std::vector<std::vector<int64_t>> EpochPlan::indices(int epoch, int64_t start) {
  std::vector<int64_t> order;
  if (sampler_) order = sampler_->of_epoch(epoch);
  std::vector<std::vector<int64_t>> all;
  for (const Shard& shard : shards()) {
    DistributedSampler dealt(places(), shard, sampler_options(options_));
    dealt.set_epoch(epoch);
    dealt.set_start(start);
    all.push_back(dealt.indices());
    if (!sampler_) continue;
    for (int64_t& index : all.back()) index = order[static_cast<size_t>(index)];  // not shuffled: places in the order
  }
  return all;
}

}  // namespace detail
}  // namespace lockstep
