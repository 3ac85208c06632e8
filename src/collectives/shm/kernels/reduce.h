#pragma once

#include <cstddef>
#include <functional>

#include "collectives/shm/kernels/element.h"

namespace lockstep::shm {

/// Element i of every output becomes inputs[0][i] op inputs[1][i] op ..., with one rounding at the end (bfloat16 and
/// float16 are added in float32). The order is a balanced binary tree: the left half of n inputs has the largest power
/// of two below n, and so on within the halves; for five inputs ((0 + 1) + (2 + 3)) + 4. So sums over aligned blocks of
/// 2^k neighbours, computed beforehand, are parts of it. An output may be one of the inputs; otherwise buffers do not
/// overlap.
struct Reduction {
  void* const* outputs;
  int output_count;
  const void* const* inputs;
  int input_count;
  size_t count;
  const double* factors;  ///< kPremulSum: one for each input
};
using ReduceFunction = void (*)(const Reduction&);

/// Calls run(part) for every part of [0, parts), on any threads, and returns when all calls have.
using ShareOut = std::function<void(size_t parts, const std::function<void(size_t part)>& run)>;

/// kernel(reduction), in parts if each output has kSharedOutBytes or more. The bits are the same. A null `share_out`
/// means one part.
void reduce_in_parts(ReduceFunction kernel, const Reduction& reduction, size_t element_bytes,
                     const ShareOut& share_out);
inline constexpr size_t kPartBytes = size_t{256} << 10;  ///< of each output
inline constexpr size_t kSharedOutBytes = 2 * kPartBytes;

/// Instruction sets that have their own kernels. All kernels give the same bits, on every processor, except that the
/// bits of a NaN may differ.
enum class InstructionSet { kBaseline, kAvx2, kAvx512, kNeon };

/// The best set that this processor and operating system support.
InstructionSet best_instruction_set();
bool is_supported(InstructionSet set);
const char* name(InstructionSet set);

/// The kernel, or null if the operation is not defined for the type (bitwise operations on floats, min and max of
/// complex numbers, mean of bool, premul_sum of integers).
ReduceFunction find_reduce(DataType type, ReduceOp op, int input_count, InstructionSet set = best_instruction_set());

// One translation unit for each instruction set, compiled with its own flags. They include nothing that emits inline
// functions: the linker could keep a copy with AVX-512 code for the whole program.
ReduceFunction find_reduce_baseline(DataType type, ReduceOp op, int input_count);
ReduceFunction find_reduce_avx2(DataType type, ReduceOp op, int input_count);
ReduceFunction find_reduce_avx512(DataType type, ReduceOp op, int input_count);
ReduceFunction find_reduce_neon(DataType type, ReduceOp op, int input_count);

/// Kernels not worth vectorizing: means of integers, products of complex numbers. Null for everything else.
ReduceFunction find_reduce_rare(DataType type, ReduceOp op);

}  // namespace lockstep::shm
