#include "reducer/reducer.h"

#include <map>

#include "base/clock.h"

namespace lockstep {
namespace {

std::vector<ParameterSize> sizes_of(const std::vector<at::Tensor>& parameters) {
  std::map<std::pair<at::ScalarType, std::string>, int> kinds;
  std::vector<ParameterSize> sizes;
  for (const auto& parameter : parameters) {
    const auto key = std::make_pair(parameter.scalar_type(), parameter.device().str());
    const int kind = kinds.try_emplace(key, static_cast<int>(kinds.size())).first->second;
    sizes.push_back({static_cast<int64_t>(parameter.nbytes()), kind});
  }
  return sizes;
}

}  // namespace

Reducer::Reducer(std::vector<at::Tensor> parameters, Group group, BucketLimits limits,
                 std::function<void()> after_backward)
    : group_(std::move(group)),
      after_backward_(std::move(after_backward)),
      plan_(plan_buckets(sizes_of(parameters), limits)),
      places_(parameters.size()),
      used_(parameters.size()) {
  for (size_t b = 0; b < plan_.size(); ++b) {
    std::vector<at::Tensor> members;
    for (size_t slot = 0; slot < plan_[b].size(); ++slot) {
      members.push_back(parameters[plan_[b][slot]]);
      places_[plan_[b][slot]] = {b, slot};
    }
    buckets_.emplace_back(std::move(members), group_);
  }
  for (size_t i = 0; i < parameters.size(); ++i)
    hooks_.push_back(std::make_unique<GradientHook>(parameters[i], [this, i] { on_gradient(i); }));
}

void Reducer::on_gradient(size_t parameter) {
  std::lock_guard lock(mutex_);
  used_[parameter] = true;
  if (!synchronized_) return;
  if (phase_ == Phase::kIdle || backward_ != current_backward()) begin_backward();
  const auto [bucket, slot] = places_[parameter];
  TORCH_CHECK(!buckets_[bucket].filled(slot), "a gradient was computed twice within one backward");
  buckets_[bucket].fill(slot, /*used=*/true);
  launch_full_buckets();
}

void Reducer::begin_backward() {
  // A backward that an exception ended has left its buckets half filled.
  for (Bucket& bucket : buckets_) bucket.reset();
  launched_ = 0;
  backward_ = current_backward();
  phase_ = Phase::kInBackward;
  at_end_of_backward([this] { finish(); });
}

void Reducer::launch_full_buckets() {
  for (; launched_ < buckets_.size() && buckets_[launched_].full(); ++launched_) launch(buckets_[launched_]);
}

void Reducer::launch(Bucket& bucket) { bucket.launch(group_, ReduceOp::kMean); }

void Reducer::finish() {
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < places_.size(); ++i) {
    const auto [bucket, slot] = places_[i];
    if (!buckets_[bucket].filled(slot)) buckets_[bucket].fill(slot, used_[i]);
  }
  launch_full_buckets();
  phase_ = Phase::kIdle;
  const auto start = Clock::now();
  after_backward_();
  for (Bucket& bucket : buckets_) bucket.finish();
  waited_seconds_ += seconds_since(start);
  used_.assign(used_.size(), false);
}

}  // namespace lockstep
