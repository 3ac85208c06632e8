#include "data/sampler_order.h"

#include <c10/util/Exception.h>

#include <lockstep/error.h>

#include <string>
#include <utility>

#include "base/hash.h"

namespace lockstep {
namespace {

int64_t hash_of_order(const std::vector<int64_t>& order) {
  Hash hash;
  hash.add(order.data(), order.size() * sizeof(int64_t));
  return static_cast<int64_t>(hash.value());
}

}  // namespace

std::vector<int64_t> SamplerOrder::of_epoch(int epoch) {
  const bool again = epoch_ == epoch, resumed = std::exchange(resumed_, false);
  if (!resumed) now_ = sampler_->state_dict();
  if (!again) before_ = now_;
  if (!before_.isNone() && (again || resumed)) sampler_->load_state_dict(before_);
  std::vector<int64_t> order = sampler_->order(epoch);
  if (again && !now_.isNone()) sampler_->load_state_dict(now_);
  TORCH_CHECK(static_cast<int64_t>(order.size()) == sampler_->size(), "the sampler's size() is ", sampler_->size(),
              ", but its order() has ", order.size(), " places");
  for (const int64_t index : order)
    TORCH_CHECK(index >= 0 && index < dataset_size_, "the sampler's order() contains the index ", index,
                ", but the dataset has ", dataset_size_, " samples");
  const int64_t hash = hash_of_order(order);
  if (resumed && again && hash != hash_)
    throw Error("the sampler's order of epoch " + std::to_string(epoch + 1) +
                " differs from the order in which the checkpoint was saved; samples would be missed or seen twice");
  epoch_ = epoch;
  hash_ = hash;
  return order;
}

void SamplerOrder::insert_into(c10::impl::GenericDict& state, int64_t epoch, int64_t samples) const {
  state.insert("places", size());
  state.insert("sampler", resumed_ ? now_ : sampler_->state_dict());
  state.insert("order", hash_);
  if (samples > 0 && epoch_ == epoch) state.insert("sampler_before", before_);
}

void SamplerOrder::forget() {
  epoch_ = -1;
  hash_ = 0;
  before_ = now_ = c10::IValue();
  resumed_ = false;
}

void SamplerOrder::resume(const c10::IValue& now) {
  forget();
  if (!now.isNone()) sampler_->load_state_dict(now);
}

void SamplerOrder::resume_within(int epoch, int64_t hash, c10::IValue before, c10::IValue now) {
  epoch_ = epoch;
  hash_ = hash;
  before_ = std::move(before);
  now_ = std::move(now);
  resumed_ = true;
}

}  // namespace lockstep
