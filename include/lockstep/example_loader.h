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

/// Single examples of any type: `size()` and `get(index)`, or `get(index, seed)` if examples are drawn anew in every
/// epoch. Each example has its own seed, which depends only on the loader's seed, the epoch and the index.
/// transforms::Random and this library's transforms draw from it. Both functions must be callable from several threads
/// at once, and must always return the same result.
template <typename D>
concept ExampleDataset = requires(const D& dataset, int64_t index) {
  { dataset.size() } -> std::convertible_to<int64_t>;
}
&&(
    requires(const D& dataset, int64_t index) { dataset.get(index); } ||
    requires(const D& dataset, int64_t index, uint64_t seed) { dataset.get(index, seed); });

namespace detail {
uint64_t example_seed(const Draw& draw, int64_t index);
/// Throws c10::Error, naming the example, if `tensor` is undefined.
void check_example(const at::Tensor& tensor, int64_t index);

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

/// The type of a batch that default_collate() makes of them.
template <ExampleDataset D>
using CollatedOf = decltype(default_collate(std::declval<std::vector<ExampleOf<D>>>()));

/// Batches of any type, made from single examples by a function, like collate_fn of PyTorch's DataLoader.
///
///     using Example = std::map<std::string, at::Tensor>;
///     struct Sentences {
///       int64_t size() const { return ...; }
///       Example get(int64_t index) const { return {{"ids", ids}, {"mask", mask}}; }
///     };
///     lockstep::ExampleLoader train(Sentences(file), context, {.batch_size = 32, .shuffle = true});
///     for (auto& batch : train) loss(net(batch["ids"], batch["mask"]));    // [32, ...] each
///
/// Your own function takes a std::vector of examples and returns a batch of any type, for example padded:
///
///     lockstep::ExampleLoader train(Sentences(file), context, {.batch_size = 32},
///                                   [](std::vector<Example> examples) { return padded(examples); });
///
/// Several workers call it at once. The compiler deduces `B`, the batch's type. All guarantees of loader.h hold:
/// shares, prefetching, resuming. DataLoaderOptions::pin_memory and device find the tensors in maps, tuples, pairs and
/// vectors; a struct must list its own with `void for_each_tensor(const std::function<void(at::Tensor&)>& visit)`.
template <typename B>
class ExampleLoader : public LoaderBase {
 public:
  using Iterator = BatchIterator<B>;

  template <ExampleDataset D, typename Collate>
  requires std::convertible_to<std::invoke_result_t<const Collate&, std::vector<ExampleOf<D>>>, B> ExampleLoader(
      D dataset, const Shard& shard, DataLoaderOptions options, Collate collate)
      : ExampleLoader(std::make_shared<const D>(std::move(dataset)), std::move(collate), shard, std::move(options),
                      [](const ExampleOf<D>&, int64_t) {}) {}
  template <ExampleDataset D>
  requires std::same_as<B, CollatedOf<D>> ExampleLoader(D dataset, const Shard& shard, DataLoaderOptions options = {})
      : ExampleLoader(
            std::make_shared<const D>(std::move(dataset)),
            [](std::vector<ExampleOf<D>> examples) { return default_collate(std::move(examples)); }, shard,
            std::move(options),
            [](ExampleOf<D>& example, int64_t index) {
              detail::for_each_tensor(example, [index](at::Tensor& tensor) { detail::check_example(tensor, index); });
            }) {}

  /// Starts a pass over this rank's share. An exception that the dataset or the function throws for a batch is rethrown
  /// here, or when the iterator advances to that batch. The loader stays usable.
  Iterator begin() { return Iterator(begin_pass()); }
  std::default_sentinel_t end() const { return {}; }

 private:
  /// `check` is called with each example and its index.
  template <typename D, typename Collate, typename Check>
  ExampleLoader(std::shared_ptr<const D> dataset, Collate collate, const Shard& shard, DataLoaderOptions options,
                const Check& check)
      : LoaderBase({.make =
                        [dataset, collate = std::move(collate), check](at::ArrayRef<int64_t> indices, Draw& draw) {
                          std::vector<ExampleOf<D>> examples;
                          examples.reserve(indices.size());
                          for (const int64_t index : indices) {
                            ExampleOf<D> example = detail::example(*dataset, index, draw);
                            check(example, index);
                            examples.push_back(std::move(example));
                          }
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
