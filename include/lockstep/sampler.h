#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/ivalue.h>

namespace lockstep {

/// Which samples an epoch has, and in which order, in place of DataLoaderOptions::shuffle: weighted draws, subsets,
/// lengths that fit together.
///
///     struct Weighted : lockstep::Sampler {
///       int64_t size() const override { return weights.size(0); }
///       std::vector<int64_t> order(int epoch) override {
///         auto generator = at::make_generator<at::CPUGeneratorImpl>(seed + epoch);
///         const at::Tensor drawn = at::multinomial(weights, size(), /*replacement=*/true, generator);
///         return {drawn.data_ptr<int64_t>(), drawn.data_ptr<int64_t>() + drawn.numel()};
///       }
///       ...
///     };
///     lockstep::DataLoader train(dataset, context, {.batch_size = 32, .sampler = std::make_shared<Weighted>(...)});
///
/// The order is the whole world's: the loader deals it out to the ranks as it does its own. So every rank must get the
/// same: draw from a seed that all ranks share, not from torch's generator, whose seed is the rank's own. Used by the
/// thread of the loader alone.
class Sampler {
 public:
  virtual ~Sampler() = default;

  /// Places in an epoch: the same in every epoch and on every rank.
  virtual int64_t size() const = 0;

  /// The epoch's indices, size() of them, each below the dataset's size; repetitions allowed.
  virtual std::vector<int64_t> order(int epoch) = 0;

  /// What the orders to come depend on besides the epoch, to go on from in a checkpoint of the loader; None: nothing.
  /// The loader saves it as it was before the present epoch's order() and as it is now, so an epoch that was stopped in
  /// the middle goes on in its own order, and the next ones as if nothing had been.
  virtual c10::IValue state_dict() const { return {}; }
  virtual void load_state_dict(const c10::IValue& state) { static_cast<void>(state); }

 protected:
  Sampler() = default;
  Sampler(const Sampler&) = default;
  Sampler(Sampler&&) = default;
  Sampler& operator=(const Sampler&) = default;
  Sampler& operator=(Sampler&&) = default;
};

}  // namespace lockstep
