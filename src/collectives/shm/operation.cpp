#include "collectives/shm/operation.h"

#include "collectives/shm/rounds.h"

namespace lockstep::shm {

Operation::Operation(Request what, int rank, int size, uint64_t number)
    : request(std::move(what)), header(request), transfer(request, rank, size), sequence(number) {
  if (is_reduction(request.kind)) reduce = find_reduce(request.type, request.op, size);
}

Operation::~Operation() = default;

}  // namespace lockstep::shm
