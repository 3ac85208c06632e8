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
/// Runs the segment without a graph, and again in backward. `modules` are the ones that it calls.
std::vector<at::Tensor> checkpointed(Segment segment, std::vector<at::Tensor> inputs,
                                     std::vector<std::shared_ptr<torch::nn::Module>> modules);

/// Converts the result of a checkpointed function to a list of tensors and back.
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
/// Only as the whole result: a vector within a tuple has no known length.
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

/// Returns given[next] for a tensor and advances `next`; returns any other input unchanged.
template <typename Input>
const auto& replaced(const Input& input, const std::vector<at::Tensor>& given, size_t& next) {
  if constexpr (kIsTensor<Input>)
    return given[next++];
  else
    return input;
}

/// Calls `call` with the inputs, checkpointed.
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
  // Autograd keeps the tensors, because it notices when they change.
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
/// A `Module` whose forward is checkpointed.
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
/// activations (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; PyTorch's torch.utils.checkpoint).
/// This saves memory and costs about a third more time. The gradients have the same bits, except where an operation
/// computes differently without a graph, as recurrent layers do, and where a layer is called twice in a pass that is
/// accumulated to an earlier one, because the sums have another order.
///
///     x = lockstep::checkpoint(block, x);  // a module's holder, or a shared_ptr
///     auto [a, b] = lockstep::checkpoint([net](const at::Tensor& x, int n) mutable { ... }, x, 3);
///
/// Returns the function's result: a tensor, a vector of tensors, or a tuple or pair of tensors, tuples or pairs.
/// Gradients flow to the tensors among the inputs and to every tensor that the function reads. Other inputs are copied.
/// The function is kept until backward is over, so it must hold by value what it needs. Calls may be nested, and the
/// loss need not use every output. The second call draws the same random numbers from torch's generators, also on the
/// inputs' devices, and runs under the same autocast(). A module's buffers start the second call with the values that
/// they had in the first, and are restored after it. Buffers of modules that a function calls are updated twice.
/// DistributedDataParallel reduces the gradients as usual. checkpoint() itself does not communicate. Layers that
/// communicate in forward, such as synchronized batch norms, communicate again in backward, so every rank must
/// checkpoint the same layers.
///
/// Throws c10::Error if the function changes an input in place. Backward throws c10::Error if the second call returns
/// other tensors or, on a CPU, other values (some elements are compared); if a module's parameters, buffers, training
/// mode or layers have changed since the first call; with create_graph; and for autograd::grad() and backward(inputs),
/// which request only some gradients. Checkpoint a layer inside its ShardedUnit, ShardedUnit<Checkpointed<Layer>>, not
/// around it. Without grad mode, checkpoint() is a plain call.
template <typename Function, typename... Inputs>
auto checkpoint(Function&& function, const Inputs&... inputs) {
  using Callable = std::remove_cvref_t<Function>;
  static_assert(!detail::ModuleOnStack<Callable>, LOCKSTEP_MODULE_ON_STACK);
  static_assert(std::is_copy_constructible_v<Callable>,
                "checkpoint() keeps the callable until backward: give it a module holder or shared_ptr, or a function "
                "that can be copied");
  if constexpr (requires { detail::pointer_of(function)->forward(inputs...); }) {
    const auto module = detail::pointer_of(function);
    return detail::checkpointed_call([module](const auto&... given) { return module->forward(given...); }, {module},
                                     inputs...);
  } else {
    return detail::checkpointed_call(Callable(std::forward<Function>(function)), {}, inputs...);
  }
}

/// Cuts the sequence into `segments` segments of equally many layers and checkpoints all but the last. Memory is least
/// when `segments` is the square root of the number of layers. TORCH_CHECK fails unless `segments` is from 1 to the
/// number of layers.
at::Tensor checkpoint_sequential(const torch::nn::Sequential& layers, int segments, const at::Tensor& input);

/// A layer whose forward is checkpointed. In all else it is a `Holder`, with the same names, members and constructors.
///
///     layers->push_back(lockstep::Checkpointed<Layer>(width, heads));    // was Layer(width, heads)
///
/// REQUIRES: the layer has one forward, without default arguments.
template <typename Holder>
using Checkpointed = torch::nn::ModuleHolder<detail::CheckpointedLayer<typename Holder::ContainedType>>;

}  // namespace lockstep
