#pragma once

#include <memory>
#include <utility>

#include <lockstep/context.h>
#include <lockstep/replica.h>

namespace lockstep {

/// Trains one model on all ranks of a group: every backward leaves in each parameter's .grad the mean over the ranks
/// of what this rank computed. The mean is taken while backward runs.
///
/// It attaches to the parameters of `module` and does not wrap it: the module's names, state and methods stay as they
/// were, an optimizer made before or after is right, and destroying this object leaves the module usable alone.
/// `Module` is a ModuleHolder (TORCH_MODULE), a std::shared_ptr to an nn::Module, a torch::jit::Module, or
/// NamedTensors: a bare list of parameters.
///
/// Construction, on every rank, compares all ranks' parameters (names, order, shapes, dtypes, requires_grad) and
/// options (the first difference is an Error on all ranks) and sets parameters and buffers to rank 0's. Afterwards
/// every rank must run the same number of backward passes. Forward may be called any number of times before a backward,
/// by any method; layers may share parameters and be recomputed in backward. Ranks may reach different parameters in a
/// pass: those that no rank reached keep the .grad they had, the others get the mean with zero for the ranks that did
/// not.
///
/// After backward .grad shares this object's memory: set it to none (zero_grad's default) or to zero in place, both are
/// right. A tensor that was .grad in an earlier step keeps its values, as in PyTorch; a view of it (detach(),
/// flatten()) shows the next step's: clone() it. What cannot be averaged (gradients of create_graph, sparse ones), and
/// a module edited without refresh(), is an Error that backward throws on all ranks. A peer that is gone makes backward
/// throw Error. autograd::grad with respect to a parameter bypasses .grad, so it throws outside no_sync().
///
/// As long as there is one the process keeps the memory of freed tensors, unless the user has chosen an allocator, set
/// malloc's variables (docs/step.md), or said keep_freed_memory = false.
template <typename Module>
class DistributedDataParallel : public Replica {
 public:
  DistributedDataParallel(Module module, const Context& context, const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(std::move(module), context.group(), options) {}
  DistributedDataParallel(Module module, const Group& group, const DistributedDataParallelOptions& options = {})
      : Replica(pointer_of(module), group, options), module_(std::move(module)) {}

  /// The module's forward.
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
      return pointer_of(module_);
    } else {
      return &module_;
    }
  }
  const Module& module() const { return module_; }

 private:
  /// What Replica attaches to.
  static auto pointer_of(const Module& module) {
    if constexpr (requires { module.ptr(); }) {
      return module.ptr();
    } else {
      return module;
    }
  }

  Module module_;
};

}  // namespace lockstep
