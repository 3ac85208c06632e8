#pragma once

#include <lockstep/cxx20.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

namespace lockstep {

namespace detail {
at::Tensor stack_examples(const std::vector<at::Tensor>& tensors);
at::Tensor tensor_of(const std::vector<int64_t>& numbers);
at::Tensor tensor_of(const std::vector<double>& numbers);
at::Tensor tensor_of(const std::vector<float>& numbers);
at::Tensor tensor_of(const std::vector<bool>& values);

template <typename T>
inline constexpr bool kIsMap = requires {
  typename T::mapped_type;
  typename T::key_type;
};
template <typename T>
inline constexpr bool kIsTuple = requires {
  std::tuple_size<T>::value;
};
template <typename T>
inline constexpr bool kIsVector = false;
template <typename T>
inline constexpr bool kIsVector<std::vector<T>> = true;

/// Collects one part of each example.
template <typename E, typename Part>
auto each(std::vector<E>& examples, const Part& part) {
  std::vector<std::remove_cvref_t<decltype(part(examples.front()))>> parts;
  parts.reserve(examples.size());
  for (E& example : examples) parts.push_back(std::move(part(example)));
  return parts;
}
}  // namespace detail

/// Makes one batch of `examples` (at least one), as PyTorch's default_collate does.
///
/// Tensors are stacked; numbers become a tensor (int64 for integers; float, double and bool keep their type); strings
/// become a vector. The elements of maps, tuples, pairs and vectors are collated separately: maps with equal keys give
/// a map, tuples a tuple, vectors of equal length a vector. Throws c10::Error if the examples do not fit together, such
/// as sequences of different lengths: write your own function that pads them.
template <typename E>
auto default_collate(std::vector<E> examples) {
  if constexpr (std::same_as<E, at::Tensor>) {
    return detail::stack_examples(examples);
  } else if constexpr (std::same_as<E, std::string>) {
    return examples;
  } else if constexpr (std::same_as<E, bool> || std::same_as<E, float> || std::same_as<E, double>) {
    return detail::tensor_of(examples);
  } else if constexpr (std::integral<E>) {
    if constexpr (std::numeric_limits<E>::digits > 63)
      for (const E example : examples)
        TORCH_CHECK(example <= static_cast<E>(std::numeric_limits<int64_t>::max()), "default_collate: ", example,
                    " does not fit into int64; give the loader a function that makes a batch of such numbers");
    return detail::tensor_of(std::vector<int64_t>(examples.begin(), examples.end()));
  } else if constexpr (detail::kIsMap<E>) {
    using Value = decltype(default_collate(std::declval<std::vector<typename E::mapped_type>>()));
    std::map<typename E::key_type, Value> batch;
    for (const auto& [key, unused] : examples.front())
      batch.emplace(key, default_collate(detail::each(
                             examples, [&key](E & example) -> auto& {
                               const auto found = example.find(key);
                               TORCH_CHECK(found != example.end(), "default_collate: an example has no `", key,
                                           "`, and the first of its batch has; all examples must have the same keys");
                               return found->second;
                             })));
    for (const E& example : examples)
      TORCH_CHECK(example.size() == batch.size(), "default_collate: an example has ", example.size(),
                  " keys, and the first of its batch ", batch.size(), "; all examples must have the same keys");
    return batch;
  } else if constexpr (detail::kIsTuple<E>) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return std::make_tuple(default_collate(detail::each(
          examples, [](E & example) -> auto& { return std::get<I>(example); }))...);
    }
    (std::make_index_sequence<std::tuple_size_v<E>>());
  } else if constexpr (detail::kIsVector<E>) {
    std::vector<decltype(default_collate(std::declval<E>()))> batch;
    for (const E& example : examples)
      TORCH_CHECK(example.size() == examples.front().size(), "default_collate: an example has ", example.size(),
                  " elements, and the first of its batch ", examples.front().size());
    for (size_t i = 0; i < examples.front().size(); ++i)
      batch.push_back(default_collate(detail::each(
          examples, [i](E & example) -> auto& { return example[i]; })));
    return batch;
  } else {
    static_assert(std::same_as<E, void>,
                  "default_collate does not know examples of this type: give the loader a "
                  "function from std::vector of them to a batch");
  }
}

namespace detail {
/// Whether the tensors of a batch can be found.
template <typename B>
constexpr bool shows_tensors() {
  if constexpr (std::same_as<B, at::Tensor> || std::is_arithmetic_v<B> || std::same_as<B, std::string>) {
    return true;
  } else if constexpr (requires(B & batch, const std::function<void(at::Tensor&)>& visit) {
                         batch.for_each_tensor(visit);
                       }) {
    return true;
  } else if constexpr (kIsMap<B>) {
    return shows_tensors<typename B::mapped_type>();
  } else if constexpr (kIsVector<B>) {
    return shows_tensors<typename B::value_type>();
  } else if constexpr (kIsTuple<B>) {
    return []<size_t... I>(std::index_sequence<I...>) { return (shows_tensors<std::tuple_element_t<I, B>>() && ...); }
    (std::make_index_sequence<std::tuple_size_v<B>>());
  } else {
    return false;
  }
}

template <typename B>
void for_each_tensor(B& batch, const std::function<void(at::Tensor&)>& visit) {
  if constexpr (std::same_as<B, at::Tensor>) {
    visit(batch);
  } else if constexpr (std::is_arithmetic_v<B> || std::same_as<B, std::string>) {
  } else if constexpr (requires { batch.for_each_tensor(visit); }) {
    batch.for_each_tensor(visit);
  } else if constexpr (kIsMap<B>) {
    for (auto& [key, value] : batch) for_each_tensor(value, visit);
  } else if constexpr (kIsVector<B>) {
    for (auto& value : batch) for_each_tensor(value, visit);
  } else {
    std::apply([&](auto&... values) { (for_each_tensor(values, visit), ...); }, batch);
  }
}
}  // namespace detail

}  // namespace lockstep
