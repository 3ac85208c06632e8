#pragma once

#include <lockstep/cxx20.h>

#include <concepts>
#include <cstdint>
#include <memory>

namespace lockstep {

class VirtualRanks;

/// The part of the data that this process reads. Made from a Context or by hand.
struct Shard {
  Shard(int rank_, int world_size_, uint64_t seed_ = 0) : rank(rank_), world_size(world_size_), seed(seed_) {}
  template <typename Context>
  requires requires(const Context& context) {
    { context.rank() } -> std::convertible_to<int>;
    { context.world_size() } -> std::convertible_to<int>;
    { context.seed() } -> std::convertible_to<uint64_t>;
  }
  Shard(const Context& context)  // NOLINT: implicit
      : Shard(context.rank(), context.world_size(), context.seed()) {
    if constexpr (requires { context.virtual_rank_state(); }) virtual_ranks = context.virtual_rank_state();
  }

  int rank;
  int world_size;
  uint64_t seed;
  std::shared_ptr<VirtualRanks> virtual_ranks = nullptr;  ///< of a Context that has them; null: none
};

}  // namespace lockstep
