#include "collectives/shm/kernels/reduce.h"

namespace lockstep::shm {
namespace {

#include "collectives/shm/kernels/vectors_baseline.inc"

#include "collectives/shm/kernels/reduce_kernels.inc"

}  // namespace

ReduceFunction find_reduce_baseline(DataType type, ReduceOp op, int input_count) { return find(type, op, input_count); }

}  // namespace lockstep::shm
