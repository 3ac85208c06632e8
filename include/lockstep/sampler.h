#pragma once

#include <lockstep/cxx20.h>

#include <cstdint>
#include <vector>

#include <ATen/core/ivalue.h>

namespace lockstep {

/// Chooses the samples of an epoch and their order, in place of DataLoaderOptions::shuffle: for weighted draws,
/// subsets, or batches of similar lengths.
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
/// The order covers the whole world, and the loader deals it out to the ranks like its own. So every rank's sampler
/// must give the same order: draw from a seed that all ranks share, not from torch's generator, which is seeded
/// differently on each rank. Used only by the loader's thread.
class Sampler {
 public:
  virtual ~Sampler() = default;

  /// Length of an epoch: the same in every epoch and on every rank.
  virtual int64_t size() const = 0;

  /// The epoch's size() indices, each below the dataset's size; repetitions are allowed.
  virtual std::vector<int64_t> order(int epoch) = 0;

  /// The state, besides the epoch, on which future orders depend, for checkpoints of the loader. None: there is none.
  /// The loader saves both the state before the current epoch's order() and the present one, so an interrupted epoch
  /// continues in its own order, and later epochs come out as if the run had never stopped.
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
