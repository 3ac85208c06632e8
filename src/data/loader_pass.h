#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include <lockstep/loader.h>

#include "base/clock.h"
#include "base/virtual_ranks.h"
#include "data/epoch_plan.h"
#include "data/prefetcher.h"

namespace lockstep::detail {

/// A batch, and the time that a worker took to make it.
struct MadeBatch {
  std::shared_ptr<void> batch;
  double reading_seconds = 0;
  double transform_seconds = 0;
};

/// The position of a pass. Shared by the pass, which advances it, and its loader, which reports it.
struct LoaderPosition {
  int epoch;
  int64_t start;             ///< positions in the order that were taken before the pass
  int64_t taken = 0;         ///< samples that this rank, or each of its virtual ranks, has taken in the pass
  bool within_step = false;  ///< some of its virtual ranks have taken more
  bool complete = false;
  LoaderBase::BatchShare share = {};
  LoaderStats stats = {};
  std::weak_ptr<const void> loader = {};  ///< whose batches may train; empty: they evaluate
};

/// A pass over batches of any type: makes them ahead of time, and yields them in order.
struct LoaderPass {
  /// A batch to be made: its shard, and the range of its indices.
  struct Item {
    size_t shard;
    int64_t first, count;
    bool ends_step;  ///< all shards have had equally many
  };

  LoaderPass(BatchType type_, const EpochPlan& plan, std::shared_ptr<LoaderPosition> position_,
             std::vector<std::vector<int64_t>> indices_)
      : position(std::move(position_)),
        type(std::move(type_)),
        indices(std::move(indices_)),
        options(plan.options()),
        batch_size(plan.batch_size()),
        items(schedule(plan)),
        all_places(plan.places() - position->start),
        shard_count(plan.shard_count()),
        virtual_ranks(plan.shard().virtual_ranks),
        seed(plan.seed()),
        start(Clock::now()),
        batches(static_cast<int64_t>(items.size()), options.workers, int64_t{options.workers} * options.prefetch,
                [this](int64_t n) { return make(n); }) {}

  MadeBatch make(int64_t number) const {
    if (options.workers > 0) compute_on_this_thread_only();
    const Item& item = items[static_cast<size_t>(number)];
    const auto begin = Clock::now();
    Draw draw{.seed = seed, .epoch = position->epoch};
    MadeBatch made{.batch =
                       type.make(at::ArrayRef<int64_t>(indices[item.shard].data() + item.first, item.count), draw)};
    if (options.pin_memory)
      type.for_each_tensor(made.batch.get(), [](at::Tensor& tensor) {
        if (tensor.defined()) tensor = tensor.pin_memory();
      });
    made.transform_seconds = draw.transform_seconds;
    made.reading_seconds = std::max(0.0, seconds_since(begin) - draw.transform_seconds);
    return made;
  }

  ~LoaderPass() {
    if (virtual_ranks && !ended) virtual_ranks->leave();
  }

  /// Micro-batches of the shards in turn, each time as many as form a step.
  std::vector<Item> schedule(const EpochPlan& plan) const {
    std::vector<int64_t> batches_of_shard;
    for (const auto& own : indices) batches_of_shard.push_back(plan.batches_in(static_cast<int64_t>(own.size())));
    const int64_t in_a_row = plan.batches_in_a_row();
    const int64_t most = *std::max_element(batches_of_shard.begin(), batches_of_shard.end());
    std::vector<Item> made;
    for (int64_t begin = 0; begin < most; begin += in_a_row) {
      for (size_t shard = 0; shard < indices.size(); ++shard)
        for (int64_t batch = begin; batch < std::min(begin + in_a_row, batches_of_shard[shard]); ++batch) {
          const int64_t first = batch * batch_size, all = static_cast<int64_t>(indices[shard].size());
          made.push_back({shard, first, std::min(batch_size, all - first), /*ends_step=*/false});
        }
      made.back().ends_step = true;
    }
    return made;
  }

  /// Makes the next batch the current one, or ends the pass.
  void advance() {
    current = nullptr;
    ended = batches.taken() == batches.count();
    LoaderStats& stats = position->stats;
    const Item* const item = ended ? nullptr : &items[static_cast<size_t>(batches.taken())];
    if (virtual_ranks && ended) virtual_ranks->leave();
    if (virtual_ranks && !ended) virtual_ranks->enter(virtual_ranks->block().first + static_cast<int>(item->shard));
    if (!ended) {
      const auto begin = Clock::now();
      MadeBatch made = batches.take();
      stats.waiting_seconds += seconds_since(begin);
      stats.reading_seconds += made.reading_seconds;
      stats.transform_seconds += made.transform_seconds;
      ++stats.batches;
      current = std::move(made.batch);
      if (options.device)
        type.for_each_tensor(current.get(), [&](at::Tensor& tensor) {
          if (tensor.defined()) tensor = tensor.to(*options.device, /*non_blocking=*/options.pin_memory);
        });
    }
    stats.seconds = seconds_since(start);
    if (item != nullptr && item->ends_step) position->taken = taken_by_first_shard(*item);
    position->within_step = item != nullptr && !item->ends_step;
    position->complete = batches.taken() == batches.count();
    position->share = share(item != nullptr ? item->count : 0);
  }

  /// Called at the end of a step. No shard has had more samples than the first.
  int64_t taken_by_first_shard(const Item& last) const {
    const int64_t in_a_row = virtual_ranks ? options.accumulate : 1;
    const int64_t batch_number = last.first / batch_size;
    const int64_t batches_in_steps = (batch_number / in_a_row + 1) * in_a_row;
    return std::min(batches_in_steps * batch_size, static_cast<int64_t>(indices.front().size()));
  }

  LoaderBase::BatchShare share(int64_t here) const {
    const auto until = [&](int64_t batch) { return std::min(all_places, batch * batch_size * shard_count); };
    const auto batches_of = [&](int64_t places) { return (places + batch_size - 1) / batch_size; };
    const bool even = !options.exactly_once ||
                      batches_of(all_places / shard_count) == batches_of((all_places + shard_count - 1) / shard_count);
    if (ended) return {.on_all_ranks = even};
    if (indices.size() > 1) return {.here = here, .in_all = here, .on_all_ranks = even};
    return {.here = here, .in_all = until(batches.taken()) - until(batches.taken() - 1), .on_all_ranks = even};
  }

  const std::shared_ptr<LoaderPosition> position;
  const BatchType type;
  const std::vector<std::vector<int64_t>> indices;  ///< by shard
  const DataLoaderOptions options;
  const int64_t batch_size;
  const std::vector<Item> items;
  const int64_t all_places;  ///< in the order, from the start of the pass
  const int64_t shard_count;
  const std::shared_ptr<VirtualRanks> virtual_ranks;  ///< null: none
  const uint64_t seed;
  const Clock::time_point start;
  std::shared_ptr<void> current;
  bool ended = false;
  Prefetcher<MadeBatch> batches;  // last, so that its workers end before the members that they read
};

}  // namespace lockstep::detail
