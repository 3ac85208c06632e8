#include <ATen/ATen.h>
#include <ATen/core/Dict.h>

#include <lockstep/data_loader.h>
#include <lockstep/distributed_sampler.h>
#include <lockstep/error.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "base/clock.h"
#include "data/one_thread.h"
#include "data/prefetcher.h"

namespace lockstep {
namespace {

DistributedSamplerOptions sampler_options(const DataLoaderOptions& options, const Shard& shard) {
  return {.shuffle = options.shuffle,
          .seed = options.seed.value_or(shard.seed),
          .drop_last = options.drop_last,
          .exactly_once = options.exactly_once};
}

void check(const DataLoaderOptions& options, const Shard& shard) {
  TORCH_CHECK(options.batch_size > 0, "DataLoader: batch_size is ", options.batch_size,
              "; set it to the number of samples that each rank takes in a step, at least 1");
  TORCH_CHECK(options.workers >= 0, "DataLoader: workers is ", options.workers,
              "; set it to a number of threads, or to 0 to load in the loop itself");
  TORCH_CHECK(options.prefetch > 0, "DataLoader: prefetch is ", options.prefetch,
              "; set it to the batches a worker may be ahead, at least 1");
  TORCH_CHECK(!(options.drop_last && options.exactly_once),
              "DataLoader: drop_last leaves samples out, exactly_once keeps all; set one of them");
  TORCH_CHECK(shard.rank >= 0 && shard.rank < shard.world_size, "DataLoader: rank ", shard.rank,
              " is not in a world of ", shard.world_size);
  TORCH_CHECK(!options.pin_memory || at::hasCUDA(),
              "DataLoader: pin_memory needs CUDA, and this LibTorch or this machine has none; leave it out");
  TORCH_CHECK(!options.device || !options.device->is_cuda() || at::hasCUDA(), "DataLoader: the device is ",
              options.device.value_or(at::kCPU), ", and this LibTorch or this machine has no CUDA; leave it out");
}

/// A batch and what making it took, on a worker.
struct MadeBatch {
  Batch batch;
  double reading_seconds = 0;
  double transform_seconds = 0;
};

}  // namespace

// ---- a pass ----

/// How far a pass is. Shared by the pass, which moves on, and its loader, which may be asked for it.
struct DataLoader::Position {
  int epoch;
  int64_t start;      ///< places of the order that were taken before the pass
  int64_t taken = 0;  ///< samples that this rank has taken in the pass
  bool complete = false;
  LoaderStats stats = {};
};

struct DataLoader::Iterator::Pass {
  Pass(std::shared_ptr<const Dataset> dataset_, std::vector<int64_t> indices_, int64_t batches_,
       const DataLoaderOptions& options_, uint64_t seed_, std::shared_ptr<Position> position_)
      : position(std::move(position_)),
        dataset(std::move(dataset_)),
        indices(std::move(indices_)),
        options(options_),
        seed(seed_),
        start(Clock::now()),
        batches(batches_, options_.workers, int64_t{options_.workers} * options_.prefetch,
                [this](int64_t n) { return make(n); }) {}

  MadeBatch make(int64_t number) const {
    if (options.workers > 0) compute_on_this_thread_only();
    const int64_t first = number * options.batch_size;
    const int64_t count = std::min<int64_t>(options.batch_size, static_cast<int64_t>(indices.size()) - first);
    const auto begin = Clock::now();
    Draw draw{.seed = seed, .epoch = position->epoch};
    MadeBatch made{.batch = dataset->draw(at::ArrayRef<int64_t>(indices.data() + first, count), draw)};
    if (options.pin_memory)
      for (at::Tensor* tensor : {&made.batch.data, &made.batch.target})
        if (tensor->defined()) *tensor = tensor->pin_memory();
    made.transform_seconds = draw.transform_seconds;
    made.reading_seconds = std::max(0.0, seconds_since(begin) - draw.transform_seconds);
    return made;
  }

  /// Makes the next batch the current one, or ends the pass.
  void advance() {
    current = Batch();
    ended = batches.taken() == batches.count();
    LoaderStats& stats = position->stats;
    if (!ended) {
      const auto begin = Clock::now();
      MadeBatch made = batches.take();
      stats.waiting_seconds += seconds_since(begin);
      stats.reading_seconds += made.reading_seconds;
      stats.transform_seconds += made.transform_seconds;
      ++stats.batches;
      current = std::move(made.batch);
      if (options.device)
        for (at::Tensor* tensor : {&current.data, &current.target})
          if (tensor->defined()) *tensor = tensor->to(*options.device, /*non_blocking=*/options.pin_memory);
    }
    stats.seconds = seconds_since(start);
    position->taken = std::min(batches.taken() * options.batch_size, static_cast<int64_t>(indices.size()));
    position->complete = batches.taken() == batches.count();
  }

  const std::shared_ptr<Position> position;
  const std::shared_ptr<const Dataset> dataset;
  const std::vector<int64_t> indices;
  const DataLoaderOptions options;
  const uint64_t seed;
  const Clock::time_point start;
  Batch current;
  bool ended = false;
  Prefetcher<MadeBatch> batches;  // last, so that its workers are gone before what they read
};

DataLoader::Iterator::Iterator(std::unique_ptr<Pass> pass) : pass_(std::move(pass)) { pass_->advance(); }
DataLoader::Iterator::Iterator(Iterator&&) noexcept = default;
DataLoader::Iterator& DataLoader::Iterator::operator=(Iterator&&) noexcept = default;
DataLoader::Iterator::~Iterator() = default;

Batch& DataLoader::Iterator::operator*() const { return pass_->current; }

DataLoader::Iterator& DataLoader::Iterator::operator++() {
  pass_->advance();
  return *this;
}

bool DataLoader::Iterator::operator==(std::default_sentinel_t) const { return pass_->ended; }

// ---- the loader ----

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset, const Shard& shard, DataLoaderOptions options)
    : dataset_(std::move(dataset)), shard_(shard), options_(options) {
  TORCH_CHECK(dataset_ != nullptr, "DataLoader: no dataset");
  check(options_, shard_);
  samples_ = DistributedSampler(dataset_->size(), shard.world_size, shard.rank, sampler_options(options, shard)).size();
  size_ = samples_ / options.batch_size;
  TORCH_CHECK(size_ > 0 || !options.drop_last, "DataLoader: drop_last leaves no batch, because a rank's share is ",
              samples_, " of ", dataset_->size(), " samples, fewer than the batch_size of ", options.batch_size,
              "; lower the batch size, take fewer ranks, or leave drop_last out");
  if (options.drop_last)
    samples_ = size_ * options.batch_size;
  else if (samples_ % options.batch_size != 0)
    ++size_;
}

DataLoader::Iterator DataLoader::begin() {
  const int64_t batches = steps_left();
  DistributedSampler sampler(dataset_->size(), shard_.world_size, shard_.rank, sampler_options(options_, shard_));
  sampler.set_epoch(epoch_);
  sampler.set_start(start_);
  position_ =
      std::make_shared<Position>(Position{.epoch = epoch_, .start = start_, .stats = {.workers = options_.workers}});
  start_ = 0;
  if (epoch_count_ == 0) ++epoch_;
  return Iterator(std::make_unique<Iterator::Pass>(dataset_, sampler.indices(), batches, options_,
                                                   options_.seed.value_or(shard_.seed), position_));
}

int64_t DataLoader::first_step() const {
  const int64_t samples = options_.batch_size * shard_.world_size;
  return start_ / samples + (start_ % samples != 0 ? 1 : 0);
}

int64_t DataLoader::steps_left() const {
  if (start_ == 0) return size_;
  const int64_t left =
      DistributedSampler(dataset_->size() - start_, shard_.world_size, shard_.rank, sampler_options(options_, shard_))
          .size();
  return left / options_.batch_size + (!options_.drop_last && left % options_.batch_size != 0 ? 1 : 0);
}

LoaderStats DataLoader::stats() const { return position_ != nullptr ? position_->stats : LoaderStats(); }

// ---- where it is ----

c10::IValue DataLoader::state_dict() const {
  int64_t epoch = epoch_, samples = start_;
  // A loop over epochs may have gone beyond the newest pass.
  const bool current = position_ != nullptr && (epoch_count_ == 0 || position_->epoch == epoch_);
  if (current && start_ == 0) {
    epoch = position_->epoch + (position_->complete ? 1 : 0);
    if (!position_->complete)
      samples = std::min(dataset_->size(), position_->start + position_->taken * shard_.world_size);
  }
  c10::impl::GenericDict state(c10::AnyType::get(), c10::AnyType::get());
  state.insert("epoch", epoch);
  state.insert("samples", samples);
  state.insert("dataset_size", dataset_->size());
  state.insert("seed", static_cast<int64_t>(options_.seed.value_or(shard_.seed)));
  state.insert("shuffle", options_.shuffle);
  return state;
}

void DataLoader::load_state_dict(const c10::IValue& state) {
  TORCH_CHECK(epoch_count_ == 0, "DataLoader::load_state_dict inside the loop over epochs(); call it before");
  const c10::impl::GenericDict own = state_dict().toGenericDict();
  if (!state.isGenericDict()) throw Error("the state of a DataLoader is no dictionary");
  const c10::impl::GenericDict given = state.toGenericDict();
  const auto value = [&](const c10::IValue& key) {
    const auto found = given.find(key);
    if (found == given.end() || !(found->value().isInt() || found->value().isBool()))
      throw Error("the state of a DataLoader has no number `" + key.toStringRef() + "`");
    return found->value().isBool() ? int64_t{found->value().toBool()} : found->value().toInt();
  };
  for (const char* key : {"dataset_size", "seed", "shuffle"}) {
    const int64_t mine = own.at(key).isBool() ? int64_t{own.at(key).toBool()} : own.at(key).toInt();
    if (value(key) != mine)
      throw Error("the checkpoint is of a DataLoader whose " + std::string(key) + " was " + std::to_string(value(key)) +
                  ", not " + std::to_string(mine) + "; samples would be lost or seen twice");
  }
  const int64_t epoch = value("epoch"), samples = value("samples");
  if (epoch < 0 || epoch > std::numeric_limits<int>::max() || samples < 0 || samples > dataset_->size())
    throw Error("the checkpoint is of a DataLoader at sample " + std::to_string(samples) + " of epoch " +
                std::to_string(epoch) + ", which there is not");
  set_epoch(static_cast<int>(epoch));
  start_ = samples;
  position_ = nullptr;
}

void DataLoader::set_epoch(int epoch) {
  TORCH_CHECK(epoch >= 0, "DataLoader::set_epoch: epochs count from 0, not ", epoch);
  if (epoch_count_ != 0) {
    TORCH_CHECK(epoch == epoch_, "DataLoader::set_epoch(", epoch, ") inside the loop over epochs() at epoch ", epoch_,
                "; the loop sets the epoch itself, so leave the call out");
    return;
  }
  first_epoch_ = epoch_ = epoch;
  start_ = 0;
}

// ---- the loop over epochs ----

DataLoader::Epochs DataLoader::epochs(int count) {
  TORCH_CHECK(count >= 0, "DataLoader::epochs: the number of epochs is ", count, "; it cannot be negative");
  return Epochs(*this, count);
}

DataLoader::Epochs::Iterator DataLoader::Epochs::begin() {
  TORCH_CHECK(loader_->epoch_count_ == 0,
              "DataLoader::epochs: another loop over the epochs of this loader is under way; use a loader for each");
  if (loader_->first_epoch_ < count_) {
    under_way_ = true;
    loader_->epoch_ = loader_->first_epoch_;
    loader_->epoch_count_ = count_;
  }
  return Iterator(this);
}

void DataLoader::Epochs::advance() {
  if (++loader_->epoch_ < count_) return;
  under_way_ = false;
  loader_->epoch_count_ = 0;
}

DataLoader::Epochs::Iterator& DataLoader::Epochs::Iterator::operator++() {
  epochs_->advance();
  return *this;
}

DataLoader::Epochs::~Epochs() {
  if (!under_way_) return;
  // Left early, the epoch at hand is used up: a pass that follows gets a new order.
  ++loader_->epoch_;
  loader_->epoch_count_ = 0;
}

}  // namespace lockstep
