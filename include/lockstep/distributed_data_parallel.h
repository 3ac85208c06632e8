#pragma once

#include <memory>
#include <type_traits>
#include <utility>

#include <lockstep/context.h>
#include <lockstep/module_on_stack.h>
#include <lockstep/replica.h>

namespace lockstep {

/// Trains one model on all ranks of a group: after every backward, each parameter's .grad is the mean of the ranks'
/// gradients. The mean is computed while backward runs.
///
/// It attaches to the parameters of `module` without wrapping it. The module's names, state and methods are unchanged,
/// an optimizer may be made before or after, and the module remains usable after this object is destroyed.
/// `Module` is a ModuleHolder (TORCH_MODULE), a std::shared_ptr to an nn::Module, a torch::jit::Module, NamedTensors (a
/// bare list of parameters), or an nn::Module itself, which must then outlive this object and stay where it is.
///
/// Every rank must construct it. Construction compares all ranks' parameters (names, order, shapes, dtypes,
/// requires_grad) and options; the first difference is an Error on all ranks. It then sets parameters and buffers to
/// rank 0's. Afterwards every rank must run the same number of backward passes. Forward may be called any number of
/// times before a backward, by any method; layers may share parameters and be recomputed in backward. Ranks may reach
/// different parameters in a pass. A parameter that no rank reached keeps its .grad. For every other parameter, ranks
/// that did not reach it count as zero in the mean.
///
/// After backward, .grad shares this object's memory. Setting it to none (zero_grad's default) and zeroing it in place
/// both work. A tensor that was .grad in an earlier step keeps its values, as in PyTorch, but a view of it (detach(),
/// flatten()) shows the next step's values: clone() it instead. Backward throws Error on all ranks for gradients that
/// cannot be averaged (of create_graph, or sparse) and for a module that was edited without refresh(), and throws Error
/// if a peer is gone. autograd::grad with respect to a parameter bypasses .grad, so it throws outside no_sync().
///
/// While such an object exists, the process keeps the memory of freed tensors, unless the user has chosen an allocator,
/// has set malloc's variables (docs/step.md), or sets keep_freed_memory to false.
template <typename Module>
class DistributedDataParallel : public Replica {
 public:
  DistributedDataParallel(Module module, const Context& context, const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(std::move(module), context.group(), options) {}
  DistributedDataParallel(Module module, const Group& group, const DistributedDataParallelOptions& options = {})
      : Replica(detail::pointer_of(module), group, options), module_(std::move(module)) {
    if constexpr (std::is_same_v<Module, NamedTensors>) keeps_list(module_);
  }

  /// Calls the module's forward.
  template <typename... Arguments>
  auto operator()(Arguments&&... arguments) {
    before_forward();
    if constexpr (requires { module_->forward(std::forward<Arguments>(arguments)...); }) {
      return module_->forward(std::forward<Arguments>(arguments)...);
    } else {
      return module_.forward(std::forward<Arguments>(arguments)...);
    }
  }
  auto operator->() const {
    check_not_moved_from();
    if constexpr (requires { module_->children(); }) {
      return detail::pointer_of(module_);
    } else {
      return &module();
    }
  }
  const Module& module() const {
    if constexpr (std::is_same_v<Module, NamedTensors>) hands_out_list();
    return module_;
  }

 private:
  Module module_;
};

/// For an nn::Module that its owner keeps, `Net net;`. It is not copied: declare it before this object, and do not move
/// it.
template <detail::ModuleOnStack Module>
class DistributedDataParallel<Module> : public Replica {
 public:
  DistributedDataParallel(Module& module, const Context& context, const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(module, context.group(), options) {}
  DistributedDataParallel(Module& module, const Group& group, const DistributedDataParallelOptions& options = {})
      : Replica(detail::borrowed<torch::nn::Module>(module), group, options), module_(&module) {}

  template <typename... Arguments>
  auto operator()(Arguments&&... arguments) {
    before_forward();
    return module_->forward(std::forward<Arguments>(arguments)...);
  }
  Module* operator->() const {
    check_not_moved_from();
    return module_;
  }
  Module& module() const { return *module_; }

 private:
  Module* module_;
};

/// Explains in one sentence how to pass such a module. The rest of it prevents further compiler errors.
template <detail::PointerToModule Module>
class DistributedDataParallel<Module> : public Replica {
  static_assert(!detail::PointerToModule<Module>, LOCKSTEP_BARE_POINTER);

 public:
  DistributedDataParallel(const Module&, const Context& context, const DistributedDataParallelOptions& options = {})
      : Replica(std::shared_ptr<torch::nn::Module>(), context.group(), options) {}
  DistributedDataParallel(const Module&, const Group& group, const DistributedDataParallelOptions& options = {})
      : Replica(std::shared_ptr<torch::nn::Module>(), group, options) {}
  template <typename... Arguments>
  at::Tensor operator()(Arguments&&...);
  std::remove_pointer_t<Module>* operator->() const;
  const Module& module() const;
};

}  // namespace lockstep
