#pragma once

#include <lockstep/cxx20.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <type_traits>

#include <c10/util/ArrayRef.h>

#include <lockstep/dataset.h>

namespace lockstep::datasets {

/// Samples that a function makes: of data that the program computes, or that it holds in a form of its own.
///
///     const auto chosen = [images, labels](at::ArrayRef<int64_t> indices) {
///       const at::Tensor rows = torch::tensor(indices);
///       return lockstep::Batch{images.index_select(0, rows), labels.index_select(0, rows)};
///     };
///     lockstep::DataLoader train(lockstep::datasets::FromFunction(images.size(0), chosen), context,
///                                {.batch_size = 64, .shuffle = true});
///
/// The function returns the samples at `indices`, stacked in that order, in tensors that the caller may change. It is
/// called by several workers at once, and must always return the same result. `size` must be the same on every rank.
/// TORCH_CHECK fails for a negative size, for a null function, and, at the batch concerned, for another number of
/// samples than was asked for.
class FromFunction : public Dataset {
 public:
  using Function = std::function<Batch(at::ArrayRef<int64_t> indices)>;
  /// `seeds` has one number for each sample, which depends only on the loader's seed, the epoch and the index. What is
  /// drawn from them is new in each epoch, and the same on any number of ranks and workers, and after a resume.
  using RandomFunction = std::function<Batch(at::ArrayRef<int64_t> indices, at::ArrayRef<uint64_t> seeds)>;

  FromFunction(int64_t size, Function make);
  FromFunction(int64_t size, RandomFunction make);
  /// Explains in one sentence what is asked of a function that is neither.
  template <typename Other>
  requires(!std::convertible_to<Other, Function> && !std::convertible_to<Other, RandomFunction>)
      FromFunction(int64_t size, Other)
      : FromFunction(size, Function()) {
    static_assert(std::is_convertible_v<Other, Function>,
                  "FromFunction needs a function that takes at::ArrayRef<int64_t> indices, or these and "
                  "at::ArrayRef<uint64_t> seeds, and returns a lockstep::Batch");
  }

  int64_t size() const override { return size_; }
  /// With a RandomFunction: as in epoch 0 of a loader with seed 0.
  Batch get(at::ArrayRef<int64_t> indices) const override;
  Batch draw(at::ArrayRef<int64_t> indices, Draw& draw) const override;

 private:
  int64_t size_;
  RandomFunction make_;
};

}  // namespace lockstep::datasets
