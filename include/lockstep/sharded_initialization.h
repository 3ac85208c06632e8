#pragma once

#include <lockstep/cxx20.h>

#include <memory>

#include <lockstep/context.h>
#include <lockstep/group.h>

namespace lockstep {
namespace detail {
class MadeUnit;
}

/// Makes a model that is too large for a machine: while it lives, each ShardedUnit that this thread makes keeps only
/// this rank's part of its parameters, as soon as its constructor is done. So no rank ever holds more than one unit and
/// its own parts. The numbers are rank 0's, those that the same constructors draw without it.
///
///     const lockstep::ShardedInitialization part_by_part(context);
///     Gpt net(options);                                       // its layers are made as ShardedUnit<Layer>
///     lockstep::FullyShardedDataParallel model(net, context);
///
/// Every rank makes the same units in the same order; a difference is an Error on all ranks. A unit's parameters throw
/// when something reads them before FullyShardedDataParallel is made, so initialise them in the layer's constructor, or
/// load a state afterwards.
class ShardedInitialization {
 public:
  explicit ShardedInitialization(const Context& context) : ShardedInitialization(context.group()) {}
  /// Every rank of the group calls it. TORCH_CHECK fails if this thread has one already.
  explicit ShardedInitialization(const Group& group);
  ~ShardedInitialization();
  ShardedInitialization(const ShardedInitialization&) = delete;
  ShardedInitialization& operator=(const ShardedInitialization&) = delete;

 private:
  friend class detail::MadeUnit;
  class State;
  const std::unique_ptr<State> state_;
};

}  // namespace lockstep
