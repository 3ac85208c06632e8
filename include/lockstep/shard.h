#pragma once

#include <concepts>
#include <cstdint>

namespace lockstep {

/// The part of the data that this process reads. Made from a Context or by hand.
struct Shard {
  Shard(int rank_, int world_size_, uint64_t seed_ = 0) : rank(rank_), world_size(world_size_), seed(seed_) {}
  template <typename Context>
  requires requires(const Context& context) {
    { context.rank() } -> std::convertible_to<int>;
    { context.world_size() } -> std::convertible_to<int>;
    { context.seed() } -> std::convertible_to<uint64_t>;
  }
  Shard(const Context& context) : Shard(context.rank(), context.world_size(), context.seed()) {}  // NOLINT: implicit

  int rank;
  int world_size;
  uint64_t seed;
};

}  // namespace lockstep
