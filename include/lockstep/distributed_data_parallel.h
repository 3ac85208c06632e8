#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/context.h>
#include <lockstep/group.h>

namespace lockstep {

struct DistributedDataParallelOptions {
  /// Gradients are averaged in messages of about this size, MiB of 2^20 bytes. The first one is small, so that
  /// communication starts while backward still runs.
  double first_bucket_cap_mb = 1;
  double bucket_cap_mb = 25;
  /// Buffers (such as the running statistics of batch norm) follow rank 0's after every synchronised backward.
  bool broadcast_buffers = true;
  /// Accepted for PyTorch's sake; parameters without a gradient need no option.
  bool find_unused_parameters = false;
};

/// Keeps gradients local for the backward passes of its lifetime: they accumulate into .grad on each rank alone and
/// are averaged by the first backward after it. All ranks must hold one for the same backward passes.
class NoSyncGuard {
 public:
  explicit NoSyncGuard(bool* synchronized)
      : synchronized_(synchronized), before_(std::exchange(*synchronized, false)) {}
  ~NoSyncGuard() { *synchronized_ = before_; }
  NoSyncGuard(const NoSyncGuard&) = delete;
  NoSyncGuard& operator=(const NoSyncGuard&) = delete;

 private:
  bool* synchronized_;
  bool before_;
};

/// What DistributedDataParallel does, for parameters whose module's type is of no interest.
class Replica {
 public:
  Replica(std::shared_ptr<torch::nn::Module> module, const Group& group, DistributedDataParallelOptions options);
  ~Replica();
  Replica(const Replica&) = delete;
  Replica& operator=(const Replica&) = delete;

  [[nodiscard]] NoSyncGuard no_sync();
  /// Sets every parameter and buffer to rank `root`'s. Every rank must call it.
  void broadcast_parameters(int root = 0);
  /// Seconds this rank has stood still for communication so far: the part that did not hide behind backward.
  double communication_seconds() const;
  /// Names of the parameters of each bucket, in the order in which buckets are reduced.
  std::vector<std::vector<std::string>> bucket_parameters() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Trains one model on all ranks of a group: every backward leaves in each parameter's .grad the mean over the ranks
/// of what this rank computed. The mean is taken while backward runs.
///
/// It attaches to the module's parameters and does not wrap them: the module's names, state and forward stay as they
/// were, an optimizer made before or after is right, and destroying this object leaves the module usable alone.
///
/// Construction, on every rank, compares all ranks' parameters (names, order, shapes, dtypes, requires_grad; the first
/// difference is an Error on all ranks) and sets parameters and buffers to rank 0's. Afterwards every rank must run
/// the same number of backward passes. Ranks may reach different parameters in a pass: those that no rank reached keep
/// the .grad they had, the others get the mean with zero for the ranks that did not reach them.
///
/// After backward .grad is a view of this object's memory: set it to none (zero_grad's default) or to zero in place,
/// both are right. A peer that is gone makes backward throw Error. Use it from the thread that made it.
template <typename Module>
class DistributedDataParallel {
 public:
  /// `module` is a ModuleHolder (TORCH_MODULE) or a std::shared_ptr to a module.
  DistributedDataParallel(Module module, const Context& context, DistributedDataParallelOptions options = {})
      : DistributedDataParallel(std::move(module), context.group(), options) {}
  DistributedDataParallel(Module module, const Group& group, DistributedDataParallelOptions options = {})
      : module_(std::move(module)), replica_(std::make_unique<Replica>(pointer_of(module_), group, options)) {}

  /// The module's forward.
  template <typename... Arguments>
  auto operator()(Arguments&&... arguments) {
    return module_->forward(std::forward<Arguments>(arguments)...);
  }
  auto operator->() const { return pointer_of(module_); }
  const Module& module() const { return module_; }

  [[nodiscard]] NoSyncGuard no_sync() { return replica_->no_sync(); }
  void broadcast_parameters(int root = 0) { replica_->broadcast_parameters(root); }
  double communication_seconds() const { return replica_->communication_seconds(); }
  std::vector<std::vector<std::string>> bucket_parameters() const { return replica_->bucket_parameters(); }

 private:
  static auto pointer_of(const Module& module) {
    if constexpr (requires { module.ptr(); }) {
      return module.ptr();
    } else {
      return module;
    }
  }

  Module module_;
  std::unique_ptr<Replica> replica_;
};

}  // namespace lockstep
