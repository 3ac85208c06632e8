#include <arm_neon.h>

#include "collectives/shm/kernels/reduce.h"

namespace lockstep::shm {
namespace {

#include "collectives/shm/kernels/vectors_neon.inc"

#include "collectives/shm/kernels/reduce_kernels.inc"

}  // namespace

ReduceFunction find_reduce_neon(DataType type, ReduceOp op, int input_count) { return find(type, op, input_count); }

}  // namespace lockstep::shm
