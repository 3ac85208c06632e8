#include "collectives/shm/protocol/operation.h"

#include "collectives/shm/protocol/rounds.h"

namespace lockstep::shm {

Operation::Operation(Request&& what, ReduceFunction kernel, int rank, int size, uint64_t number)
    : request(std::move(what)), header(request), transfer(request, rank, size), sequence(number), reduce(kernel) {}

Operation::~Operation() = default;

Limits Limits::of(int world_size, bool crowded) {
  // Measured on 2 ranks (AMD EPYC): resident buffers are summed in place from 2 KiB on. Private ones up to 4 KiB take
  // as long in one shot as in slices, which from 16 KiB on are 1.05 to 1.4 times as fast. Where ranks take turns on
  // their processors, a wait costs more than the bytes that it saves.
  const size_t crowded_private = world_size <= 4 ? size_t{32} << 10 : size_t{8} << 10;
  return {.one_shot = crowded ? size_t{8} << 10 : size_t{1} << 10,
          .private_one_shot = crowded ? crowded_private : size_t{4} << 10,
          .staged = size_t{512} << 10,
          .eager = size_t{64} << 10};
}

}  // namespace lockstep::shm
