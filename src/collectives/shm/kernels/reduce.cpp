#include "collectives/shm/kernels/reduce.h"

#include <algorithm>

#include "collectives/shm/segment/layout.h"
#include "rank_page/rank_board.h"

namespace lockstep::shm {

bool is_supported(InstructionSet set) {
  // The compiler's runtime queries CPUID, and XGETBV for whether the operating system saves the registers.
#ifdef LOCKSTEP_X86_KERNELS
  switch (set) {
    case InstructionSet::kBaseline:
      return true;
    case InstructionSet::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    case InstructionSet::kAvx512:
      return is_supported(InstructionSet::kAvx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512dq");
    case InstructionSet::kNeon:
      return false;
  }
#endif
#ifdef LOCKSTEP_NEON_KERNELS
  if (set == InstructionSet::kNeon) return true;  // part of every processor of ARMv8-A that Linux runs on
#endif
  return set == InstructionSet::kBaseline;
}

InstructionSet best_instruction_set() {
  static const InstructionSet best = is_supported(InstructionSet::kAvx512) ? InstructionSet::kAvx512
                                     : is_supported(InstructionSet::kAvx2) ? InstructionSet::kAvx2
                                     : is_supported(InstructionSet::kNeon) ? InstructionSet::kNeon
                                                                           : InstructionSet::kBaseline;
  return best;
}

const char* name(InstructionSet set) {
  switch (set) {
    case InstructionSet::kBaseline:
      return "baseline";
    case InstructionSet::kAvx2:
      return "AVX2";
    case InstructionSet::kAvx512:
      return "AVX-512";
    case InstructionSet::kNeon:
      return "NEON";
  }
  return "unknown";
}

ReduceFunction find_reduce(DataType type, ReduceOp op, int input_count, [[maybe_unused]] InstructionSet set) {
  if (ReduceFunction rare = find_reduce_rare(type, op)) return rare;
#ifdef LOCKSTEP_X86_KERNELS
  if (set == InstructionSet::kAvx512) return find_reduce_avx512(type, op, input_count);
  if (set == InstructionSet::kAvx2) return find_reduce_avx2(type, op, input_count);
#endif
#ifdef LOCKSTEP_NEON_KERNELS
  if (set == InstructionSet::kNeon) return find_reduce_neon(type, op, input_count);
#endif
  return find_reduce_baseline(type, op, input_count);
}

void reduce_in_parts(ReduceFunction kernel, const Reduction& reduction, size_t element_bytes,
                     const ShareOut& share_out) {
  const size_t bytes = reduction.count * element_bytes;
  if (!share_out || bytes < kSharedOutBytes) return kernel(reduction);
  share_out((bytes + kPartBytes - 1) / kPartBytes, [&](size_t part) {
    const size_t begin = part * kPartBytes;
    void* outputs[kMaxRanks];
    const void* inputs[kMaxRanks];
    for (int i = 0; i < reduction.output_count; ++i) outputs[i] = static_cast<std::byte*>(reduction.outputs[i]) + begin;
    for (int i = 0; i < reduction.input_count; ++i)
      inputs[i] = static_cast<const std::byte*>(reduction.inputs[i]) + begin;
    kernel({outputs, reduction.output_count, inputs, reduction.input_count,
            std::min(kPartBytes, bytes - begin) / element_bytes, reduction.factors});
    own_page().beat();
  });
}

}  // namespace lockstep::shm
