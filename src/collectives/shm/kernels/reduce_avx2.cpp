#include <immintrin.h>

#include "collectives/shm/kernels/reduce.h"

namespace lockstep::shm {
namespace {

#include "collectives/shm/kernels/vectors_avx2.inc"

#include "collectives/shm/kernels/reduce_kernels.inc"

}  // namespace

ReduceFunction find_reduce_avx2(DataType type, ReduceOp op, int input_count) { return find(type, op, input_count); }

}  // namespace lockstep::shm
