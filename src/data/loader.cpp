#include <ATen/ATen.h>
#include <ATen/core/Dict.h>
#include <ATen/core/grad_mode.h>

#include <lockstep/distributed_sampler.h>
#include <lockstep/error.h>
#include <lockstep/loader.h>
#include <lockstep/sampler.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "base/data_passes.h"
#include "base/hash.h"
#include "base/loop_begin.h"
#include "base/virtual_ranks.h"
#include "data/loader_pass.h"

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
              "; set it to the number of samples that each rank takes in a step, at least 1");
  TORCH_CHECK(options.workers >= 0, "DataLoader: workers is ", options.workers,
              "; set it to a number of threads, or to 0 to load in the loop itself");
  TORCH_CHECK(options.prefetch > 0, "DataLoader: prefetch is ", options.prefetch,
              "; set it to the batches a worker may be ahead, at least 1");
  TORCH_CHECK(!(options.drop_last && options.exactly_once),
              "DataLoader: drop_last leaves samples out, exactly_once keeps all; set one of them");
  TORCH_CHECK(!(options.shuffle && options.sampler != nullptr),
              "DataLoader: the order is the sampler's, so shuffle has no effect; leave one of them out");
  TORCH_CHECK(shard.rank >= 0 && shard.rank < shard.world_size, "DataLoader: rank ", shard.rank,
              " is not in a world of ", shard.world_size);
  TORCH_CHECK(options.accumulate > 0, "DataLoader: accumulate is ", options.accumulate,
              "; set it to the number of micro-batches in a row, at least 1");
  TORCH_CHECK(!options.split_batches || options.batch_size % shards == 0,
              "DataLoader: with split_batches the batch_size of ", options.batch_size, " is divided among ", shards,
              shard.virtual_ranks ? " virtual ranks" : " ranks",
              ", but does not divide evenly; set it to a multiple of ", shards,
              ", or leave split_batches out and set each rank's");
  TORCH_CHECK(!options.pin_memory || at::hasCUDA(),
              "DataLoader: pin_memory needs CUDA, and this LibTorch or this machine has none; leave it out");
  TORCH_CHECK(!options.device || !options.device->is_cuda() || at::hasCUDA(), "DataLoader: the device is ",
              options.device.value_or(at::kCPU), ", and this LibTorch or this machine has no CUDA; leave it out");
  TORCH_CHECK(tensors_are_known || !(options.pin_memory || options.device),
              "DataLoader: pin_memory and device need to know the tensors of a batch, and this type of batch does not "
              "list them; give it a member for_each_tensor (example_loader.h), or leave the options out");
}

int64_t hash_of_order(const std::vector<int64_t>& order) {
  Hash hash;
  hash.add(order.data(), order.size() * sizeof(int64_t));
  return static_cast<int64_t>(hash.value());
}

/// What must be the same on all ranks that share out an epoch. `order`: a sampler's, as a hash.
std::vector<std::string> facts_of_pass(const LoaderBase& loader, uint64_t seed, int64_t order, int64_t start) {
  const DataLoaderOptions& options = loader.options();
  std::vector<std::string> facts;
  const auto add = [&](const std::string& name, auto value) { facts.push_back(name + ' ' + std::to_string(value)); };
  add("dataset_size", loader.dataset_size());
  add("batch_size", options.batch_size);
  add("shuffle", options.shuffle);
  add("drop_last", options.drop_last);
  add("exactly_once", options.exactly_once);
  if (options.shuffle) {
    add("seed", options.seed.value_or(seed));
    add("epoch", loader.epoch());
  }
  if (options.sampler != nullptr) {
    add("places of the sampler", options.sampler->size());
    add("order of the sampler, as a hash,", order);
  }
  add("first place", start);
  return facts;
}

}  // namespace

// ---- a pass ----

void LoaderBase::advance(Pass& pass) { pass.advance(); }
void* LoaderBase::current(const Pass& pass) { return pass.current.get(); }
bool LoaderBase::ended(const Pass& pass) { return pass.ended; }
int64_t LoaderBase::samples_of(const Pass& pass) { return pass.position->share.here; }

// ---- the order ----

/// What is known about a sampler's order, to get the same one again within an epoch and after a resume.
struct LoaderBase::SamplerState {
  int epoch = -1;        ///< of the newest order; -1: there is none
  int64_t order = 0;     ///< its hash
  c10::IValue before;    ///< the sampler's state before that order
  c10::IValue now;       ///< the state to restore once the order has been made again
  bool resumed = false;  ///< all of this comes from a checkpoint, and the sampler does not have it yet
};

int64_t LoaderBase::places() const { return options_.sampler != nullptr ? options_.sampler->size() : dataset_size_; }

std::vector<int64_t> LoaderBase::order_of_sampler() const {
  Sampler& sampler = *options_.sampler;
  SamplerState& known = *sampler_;
  const bool again = known.epoch == epoch_, resumed = std::exchange(known.resumed, false);
  if (!resumed) known.now = sampler.state_dict();
  if (!again) known.before = known.now;
  if (!known.before.isNone() && (again || resumed)) sampler.load_state_dict(known.before);
  std::vector<int64_t> order = sampler.order(epoch_);
  if (again && !known.now.isNone()) sampler.load_state_dict(known.now);
  TORCH_CHECK(static_cast<int64_t>(order.size()) == sampler.size(), "the sampler's size() is ", sampler.size(),
              ", but its order() has ", order.size(), " places");
  for (const int64_t index : order)
    TORCH_CHECK(index >= 0 && index < dataset_size_, "the sampler's order() contains the index ", index,
                ", but the dataset has ", dataset_size_, " samples");
  const int64_t hash = hash_of_order(order);
  if (resumed && again && hash != known.order)
    throw Error("the sampler's order of epoch " + std::to_string(epoch_ + 1) +
                " is not the order that the checkpoint stopped in; samples would be lost or seen twice");
  known.epoch = epoch_;
  known.order = hash;
  return order;
}

int64_t LoaderBase::order_hash() const {
  if (options_.sampler == nullptr) return 0;
  order_of_sampler();
  return sampler_->order;
}

std::vector<Shard> LoaderBase::shards() const {
  if (!shard_.virtual_ranks) return {shard_};
  std::vector<Shard> own;
  const LeafRange block = shard_.virtual_ranks->block();
  for (int v = block.first; v < block.last; ++v) own.emplace_back(v, shard_.virtual_ranks->count(), shard_.seed);
  return own;
}

int64_t LoaderBase::shard_count() const {
  return shard_.virtual_ranks ? shard_.virtual_ranks->count() : shard_.world_size;
}

bool LoaderBase::serves_several_virtual_ranks() const {
  return shard_.virtual_ranks && !shard_.virtual_ranks->one_each();
}

int64_t LoaderBase::batches_in(int64_t samples) const {
  return samples / batch_size_ + (!options_.drop_last && samples % batch_size_ != 0 ? 1 : 0);
}

std::vector<std::vector<int64_t>> LoaderBase::indices_of_pass() {
  std::vector<int64_t> order;
  if (options_.sampler != nullptr) order = order_of_sampler();
  std::vector<std::vector<int64_t>> all;
  for (const Shard& shard : shards()) {
    DistributedSampler dealt(places(), shard, sampler_options(options_));
    dealt.set_epoch(epoch_);
    dealt.set_start(start_);
    all.push_back(dealt.indices());
    if (options_.sampler == nullptr) continue;
    for (int64_t& index : all.back()) index = order[static_cast<size_t>(index)];  // not shuffled: places in the order
  }
  return all;
}

// ---- the loader ----

LoaderBase::LoaderBase(detail::BatchType type, int64_t dataset_size, const Shard& shard, DataLoaderOptions options)
    : type_(std::move(type)), dataset_size_(dataset_size), shard_(shard), options_(std::move(options)) {
  check(options_, shard_, shard_count(), type_.for_each_tensor != nullptr);
  batch_size_ = options_.split_batches ? options_.batch_size / shard_count() : options_.batch_size;
  if (options_.sampler != nullptr) sampler_ = std::make_shared<SamplerState>();
  for (const Shard& own : shards()) {
    const int64_t samples = DistributedSampler(places(), own, sampler_options(options_)).size();
    const int64_t batches = batches_in(samples);
    TORCH_CHECK(batches > 0 || !options_.drop_last, "DataLoader: drop_last leaves no batch, because a rank's share is ",
                samples, " of ", places(), " samples, fewer than the batch_size of ", batch_size_,
                "; lower the batch size, use fewer ranks, or leave drop_last out");
    size_ += batches;
    samples_ += options_.drop_last ? batches * batch_size_ : samples;
  }
}

std::shared_ptr<LoaderBase::Pass> LoaderBase::begin_pass() {
  if (!options_.exactly_once && at::GradMode::is_enabled()) loop_begins();  // else it evaluates
  std::vector<std::vector<int64_t>> indices = indices_of_pass();
  note_pass({.facts = facts_of_pass(*this, shard_.seed, sampler_ ? sampler_->order : 0, start_),
             .rank = shard_.rank, .world_size = shard_.world_size});
  position_ =
      std::make_shared<Position>(Position{.epoch = epoch_, .start = start_, .stats = {.workers = options_.workers}});
  start_ = 0;
  if (epoch_count_ == 0) ++epoch_;
  return std::make_shared<Pass>(*this, std::move(indices));
}

int64_t LoaderBase::first_step() const {
  const int64_t samples = batch_size_ * shard_count();
  return (start_ / samples + (start_ % samples != 0 ? 1 : 0)) * static_cast<int64_t>(shards().size());
}

int64_t LoaderBase::steps_left() const {
  if (start_ == 0) return size_;
  int64_t batches = 0;
  for (const Shard& own : shards())
    batches += batches_in(DistributedSampler(places() - start_, own, sampler_options(options_)).size());
  return batches;
}

int64_t LoaderBase::batches_per_step() const {
  return shard_.virtual_ranks ? static_cast<int64_t>(shards().size()) * options_.accumulate : 1;
}

double LoaderBase::share() const { return static_cast<double>(shards().size()) / static_cast<double>(shard_count()); }

LoaderStats LoaderBase::stats() const { return position_ != nullptr ? position_->stats : LoaderStats(); }

LoaderBase::BatchShare LoaderBase::batch_share() const {
  return position_ != nullptr ? position_->share : BatchShare();
}

// ---- where it is ----

c10::IValue LoaderBase::state_dict() const {
  int64_t epoch = epoch_, samples = start_;
  // A loop over epochs may be beyond the newest pass.
  const bool current = position_ != nullptr && (epoch_count_ == 0 || position_->epoch == epoch_);
  if (current && start_ == 0) {
    epoch = position_->epoch + (position_->complete ? 1 : 0);
    TORCH_CHECK(!position_->within_step,
                "the state of a DataLoader within a step, where some virtual ranks have had their micro-batch and some "
                "have not; save it after the step (when DistributedDataParallel::step_complete() is true)");
    if (!position_->complete) samples = std::min(places(), position_->start + position_->taken * shard_count());
  }
  c10::impl::GenericDict state(c10::AnyType::get(), c10::AnyType::get());
  state.insert("epoch", epoch);
  state.insert("samples", samples);
  state.insert("dataset_size", dataset_size_);
  state.insert("seed", static_cast<int64_t>(options_.seed.value_or(shard_.seed)));
  state.insert("shuffle", options_.shuffle);
  state.insert("drop_last", options_.drop_last);
  state.insert("exactly_once", options_.exactly_once);
  if (options_.sampler == nullptr) return state;
  const bool in_the_middle = samples > 0 && sampler_->epoch == epoch;
  state.insert("places", places());
  state.insert("sampler", sampler_->resumed ? sampler_->now : options_.sampler->state_dict());
  state.insert("order", sampler_->order);
  if (in_the_middle) state.insert("sampler_before", sampler_->before);
  return state;
}

void LoaderBase::load_state_dict(const c10::IValue& state) {
  TORCH_CHECK(epoch_count_ == 0, "DataLoader::load_state_dict inside the loop over epochs(); call it before the loop");
  const c10::impl::GenericDict own = state_dict().toGenericDict();
  if (!state.isGenericDict()) throw Error("the state of a DataLoader must be a dictionary");
  const c10::impl::GenericDict given = state.toGenericDict();
  const auto value = [&](const c10::IValue& key) {
    const auto found = given.find(key);
    if (found == given.end() || !(found->value().isInt() || found->value().isBool()))
      throw Error("the state of a DataLoader has no number `" + key.toStringRef() + "`");
    return found->value().isBool() ? int64_t{found->value().toBool()} : found->value().toInt();
  };
  if (given.contains("sampler") != (options_.sampler != nullptr))
    throw Error(options_.sampler != nullptr
                    ? "the checkpoint is from a DataLoader without a sampler, but this one has a sampler"
                    : "the checkpoint is from a DataLoader with a sampler, but this one has none");
  for (const std::string key : {"dataset_size", "seed", "shuffle", "places", "drop_last", "exactly_once"}) {
    if (!own.contains(key)) continue;
    // States that were saved before these were in them.
    if ((key == "drop_last" || key == "exactly_once") && !given.contains(key)) continue;
    const int64_t mine = own.at(key).isBool() ? int64_t{own.at(key).toBool()} : own.at(key).toInt();
    if (value(key) != mine)
      throw Error("the checkpoint is from a DataLoader whose " + key + " was " +
                  std::to_string(value(key)) + ", not " + std::to_string(mine) +
                  "; samples would be lost or seen twice");
  }
  const int64_t epoch = value("epoch"), samples = value("samples");
  if (epoch < 0 || epoch > std::numeric_limits<int>::max() || samples < 0 || samples > places())
    throw Error("the checkpoint is from a DataLoader at sample " + std::to_string(samples) + " of epoch " +
                std::to_string(epoch + 1) + ", which does not exist");
  if (options_.sampler != nullptr) {
    const c10::IValue now = given.at("sampler");
    *sampler_ = SamplerState();
    if (samples > 0) {
      const auto before = given.find("sampler_before");
      if (before == given.end()) throw Error("the state of a DataLoader has no `sampler_before`");
      *sampler_ = {static_cast<int>(epoch), value("order"), before->value(), now, /*resumed=*/true};
    } else if (!now.isNone()) {
      options_.sampler->load_state_dict(now);
    }
  }
  set_epoch(static_cast<int>(epoch));
  start_ = samples;
  position_ = nullptr;
}

void LoaderBase::set_epoch(int epoch) {
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

LoaderBase::Epochs LoaderBase::epochs(int count) {
  TORCH_CHECK(count >= 0, "DataLoader::epochs: the number of epochs is ", count, "; it cannot be negative");
  return Epochs(*this, count);
}

LoaderBase::Epochs::Iterator LoaderBase::Epochs::begin() {
  TORCH_CHECK(loader_->epoch_count_ == 0,
              "DataLoader::epochs: another loop over the epochs of this loader is under way; use a loader for each");
  if (loader_->first_epoch_ < count_) {
    under_way_ = true;
    loader_->epoch_ = loader_->first_epoch_;
    loader_->epoch_count_ = count_;
  }
  return Iterator(this);
}

void LoaderBase::Epochs::advance() {
  if (++loader_->epoch_ < count_) return;
  under_way_ = false;
  loader_->epoch_count_ = 0;
}

LoaderBase::Epochs::Iterator& LoaderBase::Epochs::Iterator::operator++() {
  epochs_->advance();
  return *this;
}

LoaderBase::Epochs::~Epochs() {
  if (!under_way_) return;
  // If the loop is left early, the current epoch is over: the next pass gets a new order.
  ++loader_->epoch_;
  loader_->epoch_count_ = 0;
}

}  // namespace lockstep
