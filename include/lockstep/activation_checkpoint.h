#pragma once

#include <lockstep/cxx20.h>

#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <lockstep/module_on_stack.h>

namespace lockstep {
namespace detail {

using Segment = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;
/// Runs the segment without a graph, and again in backward. `modules`: what it calls.
std::vector<at::Tensor> checkpointed(Segment segment, std::vector<at::Tensor> inputs,
                                     std::vector<std::shared_ptr<torch::nn::Module>> modules);

/// What a checkpointed function may return, as a list and back.
template <typename Result>
struct Tensors {
  static constexpr bool kIsAny = false;
};
template <>
struct Tensors<at::Tensor> {
  static constexpr bool kIsAny = true;
  static void add(const at::Tensor& tensor, std::vector<at::Tensor>& list) { list.push_back(tensor); }
  static at::Tensor take(const std::vector<at::Tensor>& list, size_t& next) { return list[next++]; }
};
/// Of a function that returns nothing else.
template <>
struct Tensors<std::vector<at::Tensor>> {
  static constexpr bool kIsAny = true;
  static void add(const std::vector<at::Tensor>& tensors, std::vector<at::Tensor>& list) { list = tensors; }
  static const std::vector<at::Tensor>& take(const std::vector<at::Tensor>& list, size_t&) { return list; }
};
template <typename... T>
struct Tensors<std::tuple<T...>> {
  static constexpr bool kIsAny = (... && (Tensors<T>::kIsAny && !std::is_same_v<T, std::vector<at::Tensor>>));
  static void add(const std::tuple<T...>& several, std::vector<at::Tensor>& list) {
    std::apply([&](const T&... one) { (Tensors<T>::add(one, list), ...); }, several);
  }
  static std::tuple<T...> take(const std::vector<at::Tensor>& list, size_t& next) {
    return std::tuple<T...>{Tensors<T>::take(list, next)...};
  }
};
template <typename A, typename B>
struct Tensors<std::pair<A, B>> {
  static constexpr bool kIsAny = Tensors<std::tuple<A, B>>::kIsAny;
  static void add(const std::pair<A, B>& both, std::vector<at::Tensor>& list) {
    Tensors<std::tuple<A, B>>::add(std::tuple<A, B>(both), list);
  }
  static std::pair<A, B> take(const std::vector<at::Tensor>& list, size_t& next) {
    return std::pair<A, B>{Tensors<A>::take(list, next), Tensors<B>::take(list, next)};
  }
};

template <typename Input>
inline constexpr bool kIsTensor = std::is_convertible_v<const Input&, const at::Tensor&>;

/// The tensor inputs are `given`, from `next` on; the others as they were.
template <typename Input>
const auto& replaced(const Input& input, const std::vector<at::Tensor>& given, size_t& next) {
  if constexpr (kIsTensor<Input>)
    return given[next++];
  else
    return input;
}

/// `call` with the inputs, checkpointed.
template <typename Call, typename... Inputs>
auto checkpointed_call(Call call, std::vector<std::shared_ptr<torch::nn::Module>> modules, const Inputs&... inputs) {
  using Result = std::remove_cvref_t<std::invoke_result_t<Call&, const Inputs&...>>;
  static_assert(Tensors<Result>::kIsAny,
                "checkpoint(): the function must return a tensor, a vector of tensors, or a tuple or pair of tensors");
  if (!at::GradMode::is_enabled()) return Result(call(inputs...));
  std::vector<at::Tensor> tensors;
  const auto take = [&]<typename Input>(const Input& input) {
    if constexpr (kIsTensor<Input>) tensors.push_back(input);
  };
  (take(inputs), ...);
  // Tensors are kept by autograd, which sees when they change.
  const auto kept = []<typename Input>(const Input& input) {
    if constexpr (kIsTensor<Input>)
      return at::Tensor();
    else
      return input;
  };
  Segment segment = [call, others = std::make_tuple(kept(inputs)...)](const std::vector<at::Tensor>& given) mutable {
    size_t next = 0;
    return std::apply(
        [&](const auto&... other) {
          const std::tuple<decltype(replaced(other, given, next))...> all{replaced(other, given, next)...};
          std::vector<at::Tensor> list;
          Tensors<Result>::add(std::apply(call, all), list);
          return list;
        },
        others);
  };
  size_t next = 0;
  const auto list = checkpointed(std::move(segment), std::move(tensors), std::move(modules));
  return Result(Tensors<Result>::take(list, next));
}

template <typename Module, typename Forward = decltype(&Module::forward)>
class CheckpointedLayer;
/// `Module` whose forward is checkpointed.
template <typename Module, typename Base, typename Result, typename... Arguments>
class CheckpointedLayer<Module, Result (Base::*)(Arguments...)> : public Module {
 public:
  using Module::Module;
  Result forward(Arguments... arguments) {
    const auto self = std::static_pointer_cast<CheckpointedLayer>(this->shared_from_this());
    return checkpointed_call(
        [self](const std::remove_cvref_t<Arguments>&... given) -> Result { return self->Module::forward(given...); },
        {self}, arguments...);
  }
};
template <typename Module, typename Base, typename Result, typename... Arguments>
class CheckpointedLayer<Module, Result (Base::*)(Arguments...) const>
    : public CheckpointedLayer<Module, Result (Base::*)(Arguments...)> {
 public:
  using CheckpointedLayer<Module, Result (Base::*)(Arguments...)>::CheckpointedLayer;
};

}  // namespace detail

/// Calls a function, or a module's forward, and keeps only its inputs for backward, which calls it again to have the
/// activations (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; PyTorch's
/// torch.utils.checkpoint). Takes less memory for about a third more time. The gradients are the same bits, unless an
/// operation computes otherwise without a graph, as recurrent layers do.
///
///     x = lockstep::checkpoint(block, x);  // a module's holder, or a shared_ptr
///     auto [a, b] = lockstep::checkpoint([net](const at::Tensor& x, int n) mutable { ... }, x, 3);
///
/// Returns what the function returns: a tensor, a vector of tensors, or a tuple or pair of tensors or such. Gradients
/// flow to the inputs that are tensors, and to whatever the function reads; other inputs are copied. The function lives
/// until backward is over, so it holds by value what it needs. Calls may be nested, and any number of outputs may be
/// left out of the loss. The second call has the random numbers of the first from torch's generators, on the devices of
/// the inputs too, and its autocast(). A module's buffers have the values of the first call in the second, and
/// afterwards those that they had before it; those of modules that a function calls change twice. A
/// DistributedDataParallel reduces the gradients as ever. No message of its own: layers that communicate in forward, as
/// synchronized batch norms do, communicate again in backward, so every rank checkpoints the same.
///
/// c10::Error is thrown where the function changes an input in place. Backward throws it if the second call returns
/// other tensors, or, on a CPU, other values, which some elements tell; if a module's parameters, buffers, training
/// mode or layers were changed since the first call; with create_graph; and for autograd::grad() and backward(inputs),
/// which ask for some gradients only. A layer of a ShardedUnit is checkpointed within it,
/// ShardedUnit<Checkpointed<Layer>>, not around it. Without grad mode, it is a plain call.
template <typename Function, typename... Inputs>
auto checkpoint(Function&& function, const Inputs&... inputs) {
  using Callable = std::remove_cvref_t<Function>;
  static_assert(!detail::ModuleOnStack<Callable>, LOCKSTEP_MODULE_ON_STACK);
  static_assert(std::is_copy_constructible_v<Callable>,
                "checkpoint() keeps what it calls until backward: give it a module holder or shared_ptr, or a function "
                "that can be copied");
  if constexpr (requires { detail::pointer_of(function)->forward(inputs...); }) {
    const auto module = detail::pointer_of(function);
    return detail::checkpointed_call([module](const auto&... given) { return module->forward(given...); }, {module},
                                     inputs...);
  } else {
    return detail::checkpointed_call(Callable(std::forward<Function>(function)), {}, inputs...);
  }
}

/// The sequence, cut into `segments` of as many layers each, of which all but the last are checkpointed: for as many
/// segments as the square root of the number of layers, the least memory. TORCH_CHECK fails unless `segments` is from 1
/// to the number of layers.
at::Tensor checkpoint_sequential(const torch::nn::Sequential& layers, int segments, const at::Tensor& input);

/// A layer whose forward is checkpointed, and which is `Holder` otherwise: its names, members and constructors.
///
///     layers->push_back(lockstep::Checkpointed<Layer>(width, heads));    // was Layer(width, heads)
///
/// It has one forward, without default arguments.
template <typename Holder>
using Checkpointed = torch::nn::ModuleHolder<detail::CheckpointedLayer<typename Holder::ContainedType>>;

}  // namespace lockstep
