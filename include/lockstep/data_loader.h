#pragma once

#include <concepts>
#include <memory>
#include <utility>

#include <lockstep/loader.h>

namespace lockstep {

/// Batches of this rank's share of a dataset, prepared ahead of time by threads.
///
///     for (int epoch : train.epochs(10))
///       for (auto& [data, target] : train) ...
///
/// loader.h documents the guarantees of loaders. If examples have more than data and target, or need padding, use
/// ExampleLoader (example_loader.h).
class DataLoader : public LoaderBase {
 public:
  using Iterator = BatchIterator<Batch>;

  /// Moves `dataset` into the one object that all workers share. `shard` is usually the Context. Throws c10::Error for
  /// invalid options.
  template <std::derived_from<Dataset> D>
  DataLoader(D dataset, const Shard& shard, DataLoaderOptions options = {})
      : DataLoader(std::shared_ptr<const Dataset>(std::make_shared<const D>(std::move(dataset))), shard,
                   std::move(options)) {}
  DataLoader(std::shared_ptr<const Dataset> dataset, const Shard& shard, DataLoaderOptions options = {});

  /// Starts a pass over this rank's share.
  ///
  /// An exception that the dataset throws for a batch is rethrown here, or when the iterator advances to that batch.
  /// The loader stays usable.
  Iterator begin() { return Iterator(begin_pass()); }
  std::default_sentinel_t end() const { return {}; }

  const Dataset& dataset() const { return *dataset_; }

 private:
  std::shared_ptr<const Dataset> dataset_;
};

}  // namespace lockstep
