#include "collectives/shm/protocol/operation.h"

#include "collectives/shm/protocol/rounds.h"

namespace lockstep::shm {

Operation::Operation(Request&& what, ReduceFunction kernel, int rank, int size, uint64_t number)
    : request(std::move(what)), header(request), transfer(request, rank, size), sequence(number), reduce(kernel) {}

Operation::~Operation() = default;

Limits Limits::of(int world_size, bool crowded) {
  // Measured with bench_shm_core on 2 ranks: in place beats one shot from 4 KiB on (0.21 us against 0.34), and for
  // private buffers one shot beats slices through chunks (64 KiB: 2.5 us against 3.1; 256 KiB: no difference). For more
  // ranks the limits follow from the traffic, and were not measured.
  const size_t private_one_shot = world_size <= 2 ? size_t{128} << 10 : world_size <= 4 ? size_t{32} << 10 : 8 << 10;
  // Where ranks take turns on their processors, a wait costs more than the bytes it saves.
  return {.one_shot = crowded ? size_t{8} << 10 : size_t{1} << 10,
          .private_one_shot = private_one_shot,
          .eager = size_t{64} << 10};
}

}  // namespace lockstep::shm
