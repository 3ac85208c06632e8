#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <lockstep/collate.h>
#include <lockstep/loader.h>

namespace lockstep {

/// Single examples of any type: `size()` and `get(index)`, or, where examples are drawn anew in every epoch,
/// `get(index, seed)`. The seed is the example's own, a function of the loader's seed, the epoch and the index, and of
/// nothing else; transforms::Random draws from it, and so do this library's transforms. Both functions must be callable
/// from several threads at once, and give the same whenever asked.
template <typename D>
concept ExampleDataset = requires(const D& dataset, int64_t index) {
  { dataset.size() } -> std::convertible_to<int64_t>;
}
&&(
    requires(const D& dataset, int64_t index) { dataset.get(index); } ||
    requires(const D& dataset, int64_t index, uint64_t seed) { dataset.get(index, seed); });

namespace detail {
uint64_t example_seed(const Draw& draw, int64_t index);

template <ExampleDataset D>
auto example(const D& dataset, int64_t index, const Draw& draw) {
  if constexpr (requires(uint64_t seed) { dataset.get(index, seed); }) {
    return dataset.get(index, example_seed(draw, index));
  } else {
    return dataset.get(index);
  }
}
}  // namespace detail

/// The type of a dataset's examples.
template <ExampleDataset D>
using ExampleOf = decltype(detail::example(std::declval<const D&>(), int64_t{}, Draw()));

/// A batch of them by default_collate().
template <ExampleDataset D>
using CollatedOf = decltype(default_collate(std::declval<std::vector<ExampleOf<D>>>()));

/// Batches of any type, each made of single examples by a function: what collate_fn is to PyTorch's DataLoader.
///
///     using Example = std::map<std::string, at::Tensor>;
///     struct Sentences {
///       int64_t size() const { return ...; }
///       Example get(int64_t index) const { return {{"ids", ids}, {"mask", mask}}; }
///     };
///     lockstep::ExampleLoader train(Sentences(file), context, {.batch_size = 32, .shuffle = true});
///     for (auto& batch : train) loss(net(batch["ids"], batch["mask"]));    // [32, ...] each
///
/// A function of one's own takes a std::vector of examples and returns a batch of any type, say padded:
///
///     lockstep::ExampleLoader train(Sentences(file), context, {.batch_size = 32},
///                                   [](std::vector<Example> examples) { return padded(examples); });
///
/// It is called by several workers at once. `B` is the batch's type, which the compiler finds. All that loader.h
/// promises holds: shares, prefetching, resuming. DataLoaderOptions::pin_memory and device know the tensors of maps,
/// tuples, pairs and vectors; a struct has to show them, by `void for_each_tensor(const
/// std::function<void(at::Tensor&)>& visit)`.
template <typename B>
class ExampleLoader : public LoaderBase {
 public:
  using Iterator = BatchIterator<B>;

  template <ExampleDataset D, typename Collate>
  requires std::convertible_to<std::invoke_result_t<const Collate&, std::vector<ExampleOf<D>>>, B> ExampleLoader(
      D dataset, const Shard& shard, DataLoaderOptions options, Collate collate)
      : ExampleLoader(std::make_shared<const D>(std::move(dataset)), std::move(collate), shard, std::move(options)) {}
  template <ExampleDataset D>
  requires std::same_as<B, CollatedOf<D>> ExampleLoader(D dataset, const Shard& shard, DataLoaderOptions options = {})
      : ExampleLoader(std::move(dataset), shard, std::move(options),
                      [](std::vector<ExampleOf<D>> examples) { return default_collate(std::move(examples)); }) {}

  /// Starts a pass over this rank's share. Here and in advancing the iterator, what the dataset or the function threw
  /// for a batch is rethrown in that batch's turn. The loader stays usable.
  Iterator begin() { return Iterator(begin_pass()); }
  std::default_sentinel_t end() const { return {}; }

 private:
  template <typename D, typename Collate>
  ExampleLoader(std::shared_ptr<const D> dataset, Collate collate, const Shard& shard, DataLoaderOptions options)
      : LoaderBase({.make =
                        [dataset, collate = std::move(collate)](at::ArrayRef<int64_t> indices, Draw& draw) {
                          std::vector<ExampleOf<D>> examples;
                          examples.reserve(indices.size());
                          for (const int64_t index : indices)
                            examples.push_back(detail::example(*dataset, index, draw));
                          return std::make_shared<B>(collate(std::move(examples)));
                        },
                    .for_each_tensor = visitor()},
                   dataset->size(), shard, std::move(options)) {}

  static std::function<void(void*, const std::function<void(at::Tensor&)>&)> visitor() {
    if constexpr (detail::shows_tensors<B>()) {
      return [](void* batch, const std::function<void(at::Tensor&)>& visit) {
        detail::for_each_tensor(*static_cast<B*>(batch), visit);
      };
    } else {
      return nullptr;
    }
  }
};

template <ExampleDataset D>
ExampleLoader(D, const Shard&, DataLoaderOptions = {}) -> ExampleLoader<CollatedOf<D>>;
template <ExampleDataset D, typename Collate>
ExampleLoader(D, const Shard&, DataLoaderOptions, Collate)
    -> ExampleLoader<std::invoke_result_t<const Collate&, std::vector<ExampleOf<D>>>>;

}  // namespace lockstep
