#include <ATen/core/Dict.h>
#include <ATen/core/grad_mode.h>

#include <lockstep/error.h>
#include <lockstep/loader.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "base/data_passes.h"
#include "base/loop_begin.h"
#include "base/state_in_use.h"
#include "base/virtual_ranks.h"
#include "data/epoch_plan.h"
#include "data/loader_pass.h"

namespace lockstep {
namespace {

/// Facts that must be equal on all ranks that share an epoch.
std::vector<std::string> facts_of_pass(const detail::EpochPlan& plan, int epoch, int64_t start) {
  const DataLoaderOptions& options = plan.options();
  std::vector<std::string> facts;
  const auto add = [&](const std::string& name, auto value) { facts.push_back(name + ' ' + std::to_string(value)); };
  add("dataset_size", plan.dataset_size());
  add("batch_size", options.batch_size);
  add("shuffle", options.shuffle);
  add("drop_last", options.drop_last);
  add("exactly_once", options.exactly_once);
  if (options.shuffle) {
    add("seed", plan.seed());
    add("epoch", epoch);
  }
  if (plan.sampler() != nullptr) {
    add("places of the sampler", plan.places());
    add("order of the sampler, as a hash,", plan.sampler()->hash());
  }
  add("first place", start);
  return facts;
}

}  // namespace

// ---- a pass ----

void detail::advance(LoaderPass& pass) {
  pass.advance();
  if (const auto loader = pass.position->loader.lock(); loader && !pass.ended && at::GradMode::is_enabled())
    note_batch_given({.object = loader.get(),
                      .life = loader,
                      .name = "the DataLoader that gives the training its batches",
                      .line = "checkpointer.add(\"loader\", loader)"});
}
void* detail::current(const LoaderPass& pass) { return pass.current.get(); }
bool detail::has_ended(const LoaderPass& pass) { return pass.ended; }
int64_t detail::samples_of(const LoaderPass& pass) { return pass.position->share.here; }

// ---- the loader ----

LoaderBase::LoaderBase(detail::BatchType type, int64_t dataset_size, const Shard& shard, DataLoaderOptions options)
    : type_(std::move(type)),
      plan_(std::make_shared<detail::EpochPlan>(dataset_size, shard, std::move(options),
                                                type_.for_each_tensor != nullptr)) {
  const bool drop_last = plan_->options().drop_last;
  for (const int64_t samples : plan_->samples_of_shards(/*start=*/0)) {
    const int64_t batches = plan_->batches_in(samples);
    TORCH_CHECK(batches > 0 || !drop_last, "DataLoader: drop_last leaves no batch, because a rank's share is ", samples,
                " of ", plan_->places(), " samples, fewer than the batch_size of ", plan_->batch_size(),
                "; lower the batch size, use fewer ranks, or leave out drop_last");
    size_ += batches;
    samples_ += drop_last ? batches * plan_->batch_size() : samples;
  }
}

std::shared_ptr<detail::LoaderPass> LoaderBase::begin_pass() {
  const DataLoaderOptions& options = plan_->options();
  const bool trains = !options.exactly_once && at::GradMode::is_enabled();  // otherwise it evaluates
  if (trains) loop_begins();
  std::vector<std::vector<int64_t>> indices = plan_->indices(epoch_, start_);
  note_pass({.facts = facts_of_pass(*plan_, epoch_, start_), .rank = rank(), .world_size = world_size()});
  position_ = std::make_shared<detail::LoaderPosition>(
      detail::LoaderPosition{.epoch = epoch_, .start = start_, .stats = {.workers = options.workers}});
  if (trains) position_->loader = plan_;
  start_ = 0;
  if (epoch_count_ == 0) ++epoch_;
  return std::make_shared<detail::LoaderPass>(type_, *plan_, position_, std::move(indices));
}

int64_t LoaderBase::first_step() const {
  const int64_t samples = plan_->batch_size() * plan_->shard_count();
  return (start_ / samples + (start_ % samples != 0 ? 1 : 0)) * static_cast<int64_t>(plan_->shards().size());
}

int64_t LoaderBase::steps_left() const {
  if (start_ == 0) return size_;
  int64_t batches = 0;
  for (const int64_t samples : plan_->samples_of_shards(start_)) batches += plan_->batches_in(samples);
  return batches;
}

int64_t LoaderBase::batches_per_step() const {
  return static_cast<int64_t>(plan_->shards().size()) * plan_->batches_in_a_row();
}

double LoaderBase::share() const {
  return static_cast<double>(plan_->shards().size()) / static_cast<double>(plan_->shard_count());
}

int64_t LoaderBase::dataset_size() const { return plan_->dataset_size(); }

const DataLoaderOptions& LoaderBase::options() const { return plan_->options(); }

int LoaderBase::rank() const { return plan_->shard().rank; }

int LoaderBase::world_size() const { return plan_->shard().world_size; }

int64_t LoaderBase::order_hash() const {
  if (plan_->sampler() == nullptr) return 0;
  plan_->sampler()->of_epoch(epoch_);
  return plan_->sampler()->hash();
}

bool LoaderBase::serves_several_virtual_ranks() const {
  const auto& virtual_ranks = plan_->shard().virtual_ranks;
  return virtual_ranks && !virtual_ranks->one_each();
}

LoaderStats LoaderBase::stats() const { return position_ != nullptr ? position_->stats : LoaderStats(); }

LoaderBase::BatchShare LoaderBase::batch_share() const {
  return position_ != nullptr ? position_->share : BatchShare();
}

// ---- where it is ----

c10::IValue LoaderBase::state_dict() const {
  note_kept(plan_.get());
  int64_t epoch = epoch_, samples = start_;
  // A loop over epochs may be beyond the newest pass.
  const bool current = position_ != nullptr && (epoch_count_ == 0 || position_->epoch == epoch_);
  if (current && start_ == 0) {
    epoch = position_->epoch + (position_->complete ? 1 : 0);
    TORCH_CHECK(!position_->within_step,
                "the state of a DataLoader was requested within a step, when only some virtual ranks had processed "
                "their micro-batches; save it after the step (when DistributedDataParallel::step_complete() is true)");
    if (!position_->complete)
      samples = std::min(plan_->places(), position_->start + position_->taken * plan_->shard_count());
  }
  c10::impl::GenericDict state(c10::AnyType::get(), c10::AnyType::get());
  state.insert("epoch", epoch);
  state.insert("samples", samples);
  state.insert("dataset_size", dataset_size());
  state.insert("seed", static_cast<int64_t>(plan_->seed()));
  state.insert("shuffle", options().shuffle);
  state.insert("drop_last", options().drop_last);
  state.insert("exactly_once", options().exactly_once);
  if (plan_->sampler() != nullptr) plan_->sampler()->insert_into(state, epoch, samples);
  return state;
}

void LoaderBase::load_state_dict(const c10::IValue& state) {
  TORCH_CHECK(epoch_count_ == 0,
              "DataLoader::load_state_dict was called inside the loop over epochs(); call it before the loop");
  const c10::impl::GenericDict own = state_dict().toGenericDict();
  if (!state.isGenericDict()) throw Error("the state of a DataLoader must be a dictionary");
  const c10::impl::GenericDict given = state.toGenericDict();
  const auto value = [&](const c10::IValue& key) {
    const auto found = given.find(key);
    if (found == given.end() || !(found->value().isInt() || found->value().isBool()))
      throw Error("the state of a DataLoader has no number `" + key.toStringRef() + "`");
    return found->value().isBool() ? int64_t{found->value().toBool()} : found->value().toInt();
  };
  SamplerOrder* const sampler = plan_->sampler();
  if (given.contains("sampler") != (sampler != nullptr))
    throw Error(sampler != nullptr
                    ? "the checkpoint was saved by a DataLoader without a sampler, but this one has a sampler"
                    : "the checkpoint was saved by a DataLoader with a sampler, but this one has none");
  for (const std::string key : {"dataset_size", "seed", "shuffle", "places", "drop_last", "exactly_once"}) {
    if (!own.contains(key)) continue;
    // States saved by versions that did not have these.
    if ((key == "drop_last" || key == "exactly_once") && !given.contains(key)) continue;
    const int64_t mine = own.at(key).isBool() ? int64_t{own.at(key).toBool()} : own.at(key).toInt();
    if (value(key) != mine)
      throw Error("the checkpoint was saved by a DataLoader whose " + key + " was " + std::to_string(value(key)) +
                  ", not " + std::to_string(mine) + "; samples would be missed or seen twice");
  }
  const int64_t epoch = value("epoch"), samples = value("samples");
  if (epoch < 0 || epoch > std::numeric_limits<int>::max() || samples < 0 || samples > plan_->places())
    throw Error("the checkpoint was saved by a DataLoader at sample " + std::to_string(samples) + " of epoch " +
                std::to_string(epoch + 1) + ", which does not exist");
  if (sampler != nullptr && samples > 0) {
    const auto before = given.find("sampler_before");
    if (before == given.end()) throw Error("the state of a DataLoader has no `sampler_before`");
    sampler->resume_within(static_cast<int>(epoch), value("order"), before->value(), given.at("sampler"));
  } else if (sampler != nullptr) {
    sampler->resume(given.at("sampler"));
  }
  set_epoch(static_cast<int>(epoch));
  start_ = samples;
  position_ = nullptr;
}

void LoaderBase::set_epoch(int epoch) {
  TORCH_CHECK(epoch >= 0, "DataLoader::set_epoch: epochs count from 0, not ", epoch);
  if (epoch_count_ != 0) {
    TORCH_CHECK(epoch == epoch_, "DataLoader::set_epoch(", epoch,
                ") was called inside the loop over epochs() at epoch ", epoch_,
                "; the loop sets the epoch itself, so remove the call");
    return;
  }
  note_kept(plan_.get());
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
              "DataLoader::epochs: another loop over the epochs of this loader is still running; give each loop its "
              "own loader");
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
  // If the loop is left early, the current epoch is over, and the next pass gets a new order.
  ++loader_->epoch_;
  loader_->epoch_count_ = 0;
}

}  // namespace lockstep
