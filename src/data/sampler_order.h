#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>

#include <lockstep/sampler.h>

namespace lockstep {

/// A user's sampler, and the data needed to reproduce its newest order within an epoch and after a resume.
class SamplerOrder {
 public:
  SamplerOrder(std::shared_ptr<Sampler> sampler, int64_t dataset_size)
      : sampler_(std::move(sampler)), dataset_size_(dataset_size) {}

  /// Places in an epoch.
  int64_t size() const { return sampler_->size(); }
  /// The indices of that epoch's samples; repeated calls for the last epoch return the same. Throws c10::Error for
  /// indices that the dataset does not have, and Error if the order differs from the checkpoint's.
  std::vector<int64_t> of_epoch(int epoch);
  /// A hash of the newest order; 0: none.
  int64_t hash() const { return hash_; }

  /// Adds to the state of a loader that has taken this many samples of an epoch.
  void insert_into(c10::impl::GenericDict& state, int64_t epoch, int64_t samples) const;
  /// Continues from the sampler's state after a whole epoch.
  void resume(const c10::IValue& now);
  /// Continues within an epoch whose order had that hash. `before` and `now` are the sampler's states before and after
  /// it.
  void resume_within(int epoch, int64_t hash, c10::IValue before, c10::IValue now);

 private:
  void forget();

  const std::shared_ptr<Sampler> sampler_;
  const int64_t dataset_size_;

  // Of the newest order.
  int epoch_ = -1;  ///< -1: none
  int64_t hash_ = 0;
  c10::IValue before_;    ///< the sampler's state before that order
  c10::IValue now_;       ///< the state to restore once the order has been made again
  bool resumed_ = false;  ///< all of this comes from a checkpoint, and is not in the sampler yet
};

}  // namespace lockstep
