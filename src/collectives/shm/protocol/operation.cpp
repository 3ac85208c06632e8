#include "collectives/shm/protocol/operation.h"

#include "collectives/shm/protocol/rounds.h"

namespace lockstep::shm {

Operation::Operation(Request&& what, ReduceFunction kernel, int rank, int size, uint64_t number)
    : request(std::move(what)), header(request), transfer(request, rank, size), sequence(number), reduce(kernel) {}

Operation::~Operation() = default;

}  // namespace lockstep::shm
