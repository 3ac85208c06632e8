#include "collectives/shm/protocol/operation.h"

#include "collectives/shm/protocol/rounds.h"

namespace lockstep::shm {

Operation::Operation(Request&& what, ReduceFunction kernel, int rank, int size, uint64_t number)
    : request(std::move(what)), header(request), transfer(request, rank, size), sequence(number), reduce(kernel) {}

Operation::~Operation() = default;

Limits Limits::of(int world_size, bool crowded) {
  // Measured on 2 ranks (AMD EPYC): resident buffers are summed in place from 2 KiB on. Private ones take 1.07 of the
  // time in slices that they take in one shot at 8 KiB, as long at 16 KiB, and from 64 KiB on 0.65 to 0.85. Where ranks
  // take turns on their processors, a wait costs more than the bytes that it saves. Operations with a root take 0.5 to
  // 0.8 of the time at 8 KiB through memory that nobody caches, and as long at 4. In rounds (rounds.cpp) they take 1.6
  // times as long at 16 KiB, and as long from 128 on. Of two ranks that both send, rounds take 0.75 at 4 KiB.
  const size_t crowded_private = world_size <= 4 ? size_t{32} << 10 : size_t{8} << 10;
  return {.one_shot = crowded ? size_t{8} << 10 : size_t{1} << 10,
          .private_one_shot = crowded ? crowded_private : size_t{8} << 10,
          .staged = size_t{512} << 10,
          .one_way = (crowded ? size_t{64} : size_t{8}) << 10,
          .warm = size_t{4} << 10,
          .cold = crowded ? 0 : size_t{64} << 10,
          .both_ways = (crowded ? size_t{64} : size_t{world_size == 2 ? 2u : 8u}) << 10,
          .background = size_t{64} << 10};
}

}  // namespace lockstep::shm
