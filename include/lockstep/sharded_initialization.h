#pragma once

#include <lockstep/cxx20.h>

#include <memory>

#include <lockstep/context.h>
#include <lockstep/group.h>

namespace lockstep {
namespace detail {
class MadeUnit;
}

/// Makes a model that is too large for a machine. While it lives, each ShardedUnit that this thread makes keeps only
/// this rank's part of its parameters once its constructor is done. So no rank ever holds more than one unit and its
/// own parts. Random numbers are rank 0's, the same that the constructors would draw without this object.
///
///     const lockstep::ShardedInitialization part_by_part(context);
///     Gpt net(options);                                       // its layers are made as ShardedUnit<Layer>
///     lockstep::FullyShardedDataParallel model(net, context);
///
/// Every rank must make the same units in the same order; a difference is an Error on all ranks. Reading a unit's
/// parameters before FullyShardedDataParallel is made throws, so initialise them in the layer's constructor, or load a
/// state afterwards.
class ShardedInitialization {
 public:
  explicit ShardedInitialization(const Context& context) : ShardedInitialization(context.group()) {}
  /// Every rank of the group must call it. TORCH_CHECK fails if this thread already has one.
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
