#pragma once

#include "collectives/shm/kernels/reduce.h"

// One translation unit for each instruction set, compiled with its own flags. They include nothing that emits inline
// functions: the linker could keep a copy with AVX-512 code for the whole program.
namespace lockstep::shm {

ReduceFunction find_reduce_baseline(DataType type, ReduceOp op, int input_count);
ReduceFunction find_reduce_avx2(DataType type, ReduceOp op, int input_count);
ReduceFunction find_reduce_avx512(DataType type, ReduceOp op, int input_count);
ReduceFunction find_reduce_neon(DataType type, ReduceOp op, int input_count);

/// Kernels not worth vectorizing: means of integers, products of complex numbers. Null for everything else.
ReduceFunction find_reduce_rare(DataType type, ReduceOp op);

}  // namespace lockstep::shm
